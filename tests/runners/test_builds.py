"""Trees are copies with exactly the diff in them; manifests show every difference that no patch names."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from longrecall.runners.builds import (
    BuildError,
    ModelFolder,
    clean_store,
    differences,
    hash_tree,
    make_base_tree,
    make_patched_tree,
    prepare_builds,
    recorded_env,
)
from longrecall.runners.engines import ENGINES, ROOT
from longrecall.runners.patchset import load_patchset
from longrecall.runners.schema import Manifest, Patch, PatchSet

REFERENCE = ENGINES["reference"]
FOLDERS = ("kernels", "runners")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name, text in {
        "kernels/moe/routing.py": "FACTOR = 2.5\nTIMES = 1\n",
        "kernels/indexer.py": "from longrecall.kernels.moe.routing import FACTOR\n",
        "runners/server.py": "import longrecall.kernels.indexer\n",
        "runners/weights.safetensors": "xx",
        "kernels/notes.bin": "not code",
        "kernels/__pycache__/x.py": "cached",
        "results/page.py": "not served",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def diff_of(new: str = "TIMES = 2", path: str = "kernels/moe/routing.py") -> str:
    return f"--- a/{path}\n+++ b/{path}\n@@ -1,2 +1,2 @@\n FACTOR = 2.5\n-TIMES = 1\n+{new}\n"


def test_a_base_tree_holds_the_code_and_nothing_else(source: Path, tmp_path: Path) -> None:
    tree, tree_hash = make_base_tree(source, FOLDERS, tmp_path / "store")
    files = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file() and ".ns" not in path.parts}
    assert files == {"kernels/moe/routing.py", "kernels/indexer.py", "runners/server.py", "runners/weights.safetensors"}
    assert tree_hash == hash_tree(source, FOLDERS) and tree.name == tree_hash[:16]
    assert make_base_tree(source, FOLDERS, tmp_path / "store") == (tree, tree_hash)


def test_a_patched_tree_differs_in_the_patched_file_alone(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    base, base_hash = make_base_tree(source, FOLDERS, store)
    tree, tree_hash = make_patched_tree(base, FOLDERS, store, [("x.diff", diff_of())], "x")
    assert tree_hash != base_hash
    assert (tree / "kernels/moe/routing.py").read_text() == "FACTOR = 2.5\nTIMES = 2\n"
    assert (base / "kernels/moe/routing.py").read_text() == "FACTOR = 2.5\nTIMES = 1\n"
    assert (tree / "runners/server.py").samefile(base / "runners/server.py")
    assert [path.name for path in store.glob(".tmp*")] == []


def test_an_edited_cached_tree_is_made_again(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    tree, tree_hash = make_base_tree(source, FOLDERS, store)
    (tree / "runners/server.py").chmod(0o644)
    (tree / "runners/server.py").write_text("spoilt\n")
    assert make_base_tree(source, FOLDERS, store) == (tree, tree_hash)
    assert hash_tree(tree, FOLDERS) == tree_hash


@pytest.mark.parametrize(
    ("diff", "said"),
    [
        (
            diff_of().replace("TIMES = 1", "TIMES = 7"),
            r"patch 'x': x.diff: kernels/moe/routing.py hunk 1 does not apply",
        ),
        (diff_of(path="results/page.py"), "results/page.py is not a file of the base source"),
        ("--- /dev/null\n+++ b/results/new.py\n@@ -0,0 +1 @@\n+x\n", "results/new.py, which is no part of the base"),
    ],
)
def test_a_diff_that_does_not_fit_leaves_no_tree(source: Path, tmp_path: Path, diff: str, said: str) -> None:
    store = tmp_path / "store"
    base, _ = make_base_tree(source, FOLDERS, store)
    with pytest.raises(BuildError, match=said):
        make_patched_tree(base, FOLDERS, store, [("x.diff", diff)], "x")
    assert [path.name for path in store.iterdir()] == [base.name]


def test_half_made_and_old_trees_are_cleaned(tmp_path: Path) -> None:
    mine, dead, old, new = (tmp_path / name for name in (f".tmp-{os.getpid()}-a", ".tmp-999999999-b", "ab12", "cd34"))
    for path in (mine, dead, old, new):
        path.mkdir()
    os.utime(old, (time.time() - 30 * 86400,) * 2)
    assert set(clean_store(tmp_path)) == {dead, old}
    assert mine.is_dir() and new.is_dir()


def test_a_build_imports_itself_and_not_an_editable_checkout(tmp_path: Path) -> None:
    """The import hook of an editable install must not complete the tree from the checkout."""
    tree, _ = make_base_tree(ROOT, REFERENCE.source_folders, tmp_path)
    hook = tmp_path / "site" / "__editable___longrecall_finder.py"
    hook.parent.mkdir()
    hook.write_text(
        "import sys\nfrom importlib.machinery import PathFinder\n"
        f"PLACES = {{'longrecall.results': {str(ROOT / 'results')!r}, 'longrecall.evals': {str(ROOT / 'evals')!r}}}\n"
        "class Finder:\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        if name in PLACES:\n"
        "            from importlib.machinery import ModuleSpec\n"
        "            spec = ModuleSpec(name, None, is_package=True)\n"
        "            spec.submodule_search_locations = [PLACES[name]]\n"
        "            return spec\n"
        "sys.meta_path.append(Finder)\n"
    )
    program = (
        f"import sys; sys.path.insert(0, {str(hook.parent)!r}); import __editable___longrecall_finder\n"
        "exec(open(sys.argv[1]).read()) if len(sys.argv) > 1 else None\n"
        "import importlib.util as u, longrecall.runners.schema as s\n"
        "print(s.__file__); print(u.find_spec('longrecall.results'))"
    )
    env = os.environ | {"PYTHONPATH": str(tree / ".ns"), "PYTHONSAFEPATH": "1"}

    def outcome(*args: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", program, *args], env=env, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert outcome()[1] != "None", "without the hook removal the checkout shows through: the test can fail"
    file, results = outcome(str(tree / ".ns" / "sitecustomize.py"))
    assert Path(file).resolve().is_relative_to(tree.resolve()) and results == "None"


def test_a_module_that_a_build_lacks_does_not_come_from_an_installed_longrecall(tmp_path: Path) -> None:
    tree, _ = make_base_tree(ROOT, REFERENCE.source_folders, tmp_path)
    installed = tmp_path / "site" / "longrecall" / "kernels"
    installed.mkdir(parents=True)
    (installed / "deleted.py").touch()
    program = f"import sys; sys.path.append({str(tmp_path / 'site')!r}); import longrecall.kernels.deleted"
    env = {"PYTHONPATH": str(tree / ".ns"), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert "No module named 'longrecall.kernels.deleted'" in done.stderr


MODEL = ModelFolder(path=Path("/models/m"), weights_hash="w", tokenizer_hash="t", template_hash="c")


@pytest.fixture
def patchset(tmp_path: Path) -> PatchSet:
    path = tmp_path / "p.toml"
    path.write_text(
        'engine = "reference"\nenv = { A = "1" }\n'
        '[[patch]]\nid = "args"\nargs = ["--index-topk", "16"]\n'
        '[[patch]]\nid = "env"\nenv = { A = "2", B = "3" }\n'
    )
    return load_patchset(path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGRECALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_build_is_the_base_plus_its_patch(patchset: PatchSet, cache: Path) -> None:
    base, again, args, env = prepare_builds(patchset, REFERENCE, MODEL, threads=1)
    assert [item.build.build_id for item in (base, again, args, env)] == ["base", "base-again", "args", "env"]
    assert [item.build.role for item in (base, again, args, env)] == ["base", "aa", "suspect", "suspect"]
    assert base.build.manifest == again.build.manifest and base.command == again.command and base.env == again.env
    assert args.command == (*base.command, "--index-topk", "16")
    assert env.env["A"] == "2" and env.env["B"] == "3" and base.env["A"] == "1" and "B" not in base.env
    assert base.env["PYTHONPATH"] == str(base.tree) + "/.ns" and base.env["OMP_NUM_THREADS"] == "1"
    assert base.build.manifest is not None and base.build.manifest.weights_hash == "w"
    assert set(base.build.manifest.packages) >= {"python", "torch", "tokenizers"}


def test_the_environment_of_the_shell_does_not_leak_in(
    patchset: PatchSet, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("TORCH_LOGS", "all")
    base = prepare_builds(patchset, REFERENCE, MODEL, threads=1)[0]
    assert "OPENAI_API_KEY" not in base.env and "TORCH_LOGS" not in base.env


def test_secrets_are_recorded_as_hashes() -> None:
    env = recorded_env({"HF_TOKEN": "abc", "A": "1"})
    assert env["A"] == "1" and env["HF_TOKEN"].startswith("sha256:") and "abc" not in env["HF_TOKEN"]


BASE = Manifest(
    source_hash="s", tree_hash="s", diff_hash=None, args=("--threads", "1"), env={"A": "1"}, packages={"torch": "2.13"},
    weights_hash="w", server_info={"backend": "sparse", "index_topk": 512, "port": 1, "kv": {"dtype": "bf16"}},
)  # fmt: skip


def said(candidate: Manifest, patch: Patch | None, patchset: PatchSet) -> list[str]:
    return [difference.what for difference in differences(BASE, candidate, patchset, patch, REFERENCE)]


def test_equal_manifests_differ_in_nothing_and_volatile_keys_are_ignored(patchset: PatchSet) -> None:
    assert said(BASE, None, patchset) == []
    info = dict(BASE.server_info or {}) | {"port": 2}
    assert said(replace(BASE, server_info=info), None, patchset) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"source_hash": "z"}, ["source"]),
        ({"tree_hash": "z"}, ["tree"]),
        ({"diff_hash": "z"}, ["diff"]),
        ({"args": ("--threads", "2")}, ["arguments"]),
        ({"env": {"A": "2"}}, ["environment A"]),
        ({"env": {"A": "1", "B": "1"}}, ["environment B"]),
        ({"packages": {"torch": "2.12"}}, ["package torch"]),
        ({"weights_hash": "z"}, ["weights_hash"]),
        ({"hardware": "gpu"}, ["hardware"]),
        ({"server_info": {"backend": "dense", "index_topk": 512, "kv": {"dtype": "bf16"}}}, ["server_info backend"]),
        ({"server_info": {"backend": "sparse", "index_topk": 512, "kv": {"dtype": "fp8"}}}, ["server_info kv.dtype"]),
    ],
)
def test_any_other_difference_is_found(patchset: PatchSet, change: dict[str, object], what: list[str]) -> None:
    candidate = replace(BASE, **change)  # type: ignore[arg-type]
    assert said(candidate, None, patchset) == what


def test_a_patch_may_change_what_it_names_and_nothing_else(patchset: PatchSet) -> None:
    patch = patchset.patches[0]
    info = dict(BASE.server_info or {}) | {"index_topk": 16}
    candidate = replace(BASE, args=("--threads", "1", "--index-topk", "16"), server_info=info)
    assert said(candidate, patch, patchset) == []
    assert said(replace(candidate, server_info=info | {"backend": "dense"}), patch, patchset) == ["server_info backend"]
    allowed = replace(patch, changes=("backend",))
    assert said(replace(candidate, server_info=info | {"backend": "dense"}), allowed, patchset) == []
    assert said(BASE, patch, patchset) == ["arguments"], "a patch that was not applied is a difference too"
