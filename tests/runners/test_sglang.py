"""Engine sglang: its base, its builds, the check of its server, its launch plans. Real processes, no real SGLang."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longrecall.needles.render import Ruler
from longrecall.results.serving import server_info
from longrecall.runners import sglang, sglang_install, sglang_model, sglang_shim
from longrecall.runners.builds import (
    BuildError,
    ModelFolder,
    PreparedBuild,
    check_builds,
    make_trees,
    prepare_builds,
    with_server_info,
    without_secrets,
)
from longrecall.runners.cli import builds as builds_command
from longrecall.runners.engines import ENGINES, engine_of
from longrecall.runners.patchset import PatchsetError, parse_patchset
from longrecall.runners.processes import HeldPort, Server, ServerError
from longrecall.runners.prompts import after_generation_prompt
from longrecall.runners.schema import Deployment, PatchSet
from longrecall.runners.sglang_group import builds_at_once, gpus_of
from longrecall.runners.sglang_launch import launch_plans, shell_text
from longrecall.runners.sglang_source import SglangSourceError, base_source, share_bytecode

ENGINE = ENGINES["sglang"]
MODEL = ModelFolder(path=Path("model"), weights_hash=None, tokenizer_hash=None, template_hash=None)


def _load_fake() -> object:
    import importlib.util

    spec = importlib.util.spec_from_file_location("fake_sglang", Path(__file__).with_name("fake_sglang.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake_sglang = _load_fake()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGRECALL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LONGRECALL_SGLANG_PYTHON", sys.executable)
    return tmp_path / "cache"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "other-backend.diff").write_text(fake_sglang.OTHER_BACKEND)  # type: ignore[attr-defined]
    (tmp_path / "other-answer.diff").write_text(fake_sglang.OTHER_ANSWER)  # type: ignore[attr-defined]
    return fake_sglang.write(tmp_path / "base")  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def patchset(tmp_path: Path, tree: Path) -> Callable[..., PatchSet]:
    def make(text: str = "", *, source: str = "base", patches: str | None = None) -> PatchSet:
        patch = '[[patch]]\nid = "p"\ndiffs = ["other-answer.diff"]\n' if patches is None else patches
        line = f'source = "{source}"\n' if source else ""
        return parse_patchset(f'engine = "sglang"\n{line}{text}\n{patch}', tmp_path / "set.toml")

    return make


def test_an_environment_that_would_not_serve_the_patched_source_is_refused(
    patchset: Callable[..., PatchSet], tmp_path: Path
) -> None:
    elsewhere = fake_sglang.write(tmp_path / "elsewhere")  # type: ignore[attr-defined]
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    hook = next((tmp_path / "env" / "lib").glob("python*/site-packages")) / "first.pth"
    hook.write_text(f"{elsewhere}\n")  # behind PYTHONPATH: harmless
    assert set(prepared(patchset(f'python = "{python}"'))) == {"base", "base-again", "p"}
    hook.write_text(f"import sys; sys.path.insert(0, {str(elsewhere)!r})\n")
    with pytest.raises(BuildError) as caught:
        prepared(patchset(f'python = "{python}"'))
    said = str(caught.value)
    assert f"would import sglang from {elsewhere}/sglang and not from this build's source" in said
    assert str(python) in said and ".pth" in said


def test_an_interpreter_that_cannot_start_is_named(patchset: Callable[..., PatchSet], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *sys.argv\\[1:*) echo "bad hook" >&2; exit 3;; esac\n'
                      f'exec {sys.executable} "$@"\n')  # fmt: skip
    python.chmod(0o755)
    with pytest.raises(BuildError, match=r"cannot look for sglang: it ended with code 3 .*\n    bad hook"):
        prepared(patchset(f'python = "{python}"'))


def test_an_interpreter_that_talks_and_knows_no_safe_path_is_asked_all_the_same(
    patchset: Callable[..., PatchSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.10 in an environment whose hooks print when it begins and when it ends."""
    python, cwd = tmp_path / "python", tmp_path / "elsewhere"
    talk = "import atexit; print('hello'); atexit.register(print, '/bye')"
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "sitecustomize.py").write_text(talk)
    python.write_text(
        '#!/bin/sh\n[ "$1" != -P ] || exit 2\necho begins\nunset PYTHONSAFEPATH\n'
        f'PYTHONPATH="$PYTHONPATH:{tmp_path}/hooks" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.chdir(fake_sglang.write(cwd))  # type: ignore[attr-defined]
    assert set(prepared(patchset(f'python = "{python}"'))) == {"base", "base-again", "p"}


def test_a_variable_of_one_patch_that_leads_elsewhere_is_found(
    patchset: Callable[..., PatchSet], tmp_path: Path
) -> None:
    elsewhere = fake_sglang.write(tmp_path / "elsewhere")  # type: ignore[attr-defined]
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    hook = next((tmp_path / "env" / "lib").glob("python*/site-packages")) / "first.pth"
    hook.write_text(f"import os, sys; 'AWAY' in os.environ and sys.path.insert(0, {str(elsewhere)!r})\n")
    text = f'python = "{tmp_path}/env/bin/python"'
    with pytest.raises(BuildError, match=r"build 'away': .* would import sglang from "):
        prepared(patchset(text, patches='[[patch]]\nid = "away"\nenv = { AWAY = "1" }\n'))


def test_the_cache_may_be_named_from_the_working_folder(
    patchset: Callable[..., PatchSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGRECALL_CACHE", "mine")
    base = prepared(patchset())["base"]
    assert base.env["PYTHONPATH"] == str(base.tree) and base.tree and base.tree.is_relative_to(tmp_path / "mine")
    monkeypatch.setenv("LONGRECALL_CACHE", "with:colon")
    with pytest.raises(BuildError, match="cannot be on PYTHONPATH; set LONGRECALL_CACHE"):
        prepared(patchset())


@pytest.mark.parametrize(
    ("before", "after", "own"),
    [
        ("KERNEL = load_jit('k', flags=['-O3'])\n", "KERNEL = load_jit('k', flags=['-O1'])\n", True),
        ("LAYERS = 1\n", "LAYERS = 2\n", False),
    ],
)
def test_a_patch_to_what_is_compiled_has_compiled_kernels_of_its_own(
    before: str, after: str, own: bool, patchset: Callable[..., PatchSet], tree: Path, tmp_path: Path
) -> None:
    (tree / "sglang" / "kernel.py").write_text(before)
    diff = f"--- a/sglang/kernel.py\n+++ b/sglang/kernel.py\n@@ -1 +1 @@\n-{before}+{after}"
    (tmp_path / "kernel.diff").write_text(diff)
    made = prepared(patchset(patches='[[patch]]\nid = "p"\ndiffs = ["kernel.diff"]\n'))
    for name in ("TVM_FFI_CACHE_DIR", "TORCH_EXTENSIONS_DIR"):
        kept = made["p"].env.get(name)
        assert name not in made["base"].env and (kept is not None) == own
        assert kept is None or Path(kept).is_relative_to(made["p"].tree or tree)
        assert (kept is not None) == (f"{name}={kept}" in shell_text(launch_plans([made["p"]], None)[0]))


def prepared(patchset: PatchSet) -> dict[str, PreparedBuild]:
    return {item.build.build_id: item for item in prepare_builds(patchset, engine_of(patchset), MODEL, threads=1)}


# Where the base comes from


def wheel_of(tree: Path, folder: Path) -> Path:
    folder.mkdir()
    path = folder / "sglang-0.0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(tree.rglob("*")):
            if file.is_file():
                archive.write(file, str(file.relative_to(tree)))
        archive.writestr(
            "sglang-0.0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("sglang-0.0.1.dist-info/RECORD", "")
        archive.writestr("somebody-else/x.py", "")
    return path


def test_a_folder_a_wheel_a_commit_and_a_release_give_the_same_tree(
    patchset: Callable[..., PatchSet], tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = wheel_of(tree, tmp_path / "wheels")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    repository = tmp_path / "checkout"
    fake_sglang.write(repository / "python")  # type: ignore[attr-defined]
    for command in (["init", "-q"], ["add", "python/sglang"], ["commit", "-q", "-m", "x"], ["tag", "v1"]):
        identity = ["-c", "user.name=x", "-c", "user.email=x@x.invalid"]
        subprocess.run(["git", *identity, *command], cwd=repository, check=True, capture_output=True)
    (repository / "python" / "sglang" / "answer.py").write_text("ANSWER = 'edited after the commit'\n")
    hashes = {}
    for source in (
        "base",
        "base/sglang",
        "path:base",
        f"wheels/{wheel.name}",
        "git:checkout@v1",
        "pypi:0.0.1",
        "0.0.1",
    ):
        base = prepared(patchset(source=source))["base"]
        assert base.tree is not None and (base.tree / "sglang" / "kernel.cuh").is_file()
        assert (base.tree / "sglang" / "answer.py").read_text() == "ANSWER = '42'\n"
        assert not (base.tree / "somebody-else").exists()
        hashes[source] = (base.tree / "sglang" / "answer.py").read_bytes()
    assert len(set(hashes.values())) == 1
    edited = prepared(patchset(source="checkout", patches='[[patch]]\nid = "p"\nenv = { A = "1" }'))["base"]
    assert edited.tree is not None and "edited" in (edited.tree / "sglang" / "answer.py").read_text()


def test_the_installed_sglang_of_an_environment_is_a_base(
    patchset: Callable[..., PatchSet], tree: Path, tmp_path: Path
) -> None:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{tree}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    made = prepared(patchset('python = "env/bin/python"', source=""))["base"]
    assert made.command[0] == str(python)
    assert made.build.manifest is not None and made.build.manifest.packages["sglang"] == "0.0.1"
    assert made.build.manifest.packages["torch"] == torch.__version__.partition("+")[0] or "torch" in (
        made.build.manifest.packages
    )
    assert made.env["PATH"].startswith(f"{python.parent}:")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere", "is no SGLang"),
        ("git:nowhere@v1", "is no folder"),
        ("git:base", "write git:FOLDER_OR_URL@REF"),
        ("git:base@v1", "ended with code"),
        ("broken.whl", "cannot be unpacked"),
        ("other.whl", "holds no sglang/__init__.py"),
        ("9.9.9", "ended with code"),
    ],
)
def test_a_base_that_cannot_be_had_is_named(
    source: str, said: str, patchset: Callable[..., PatchSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    (tmp_path / "broken.whl").write_bytes(b"not a zip")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(SglangSourceError, match=r"set\.toml") as caught:
        base_source(patchset(source=source), ENGINE, tmp_path / "cache" / "builds")
    assert said in str(caught.value)
    sources = tmp_path / "cache" / "sglang-sources"
    assert not sources.is_dir() or list(sources.iterdir()) == []


def test_a_missing_interpreter_says_how_to_make_one(patchset: Callable[..., PatchSet], tmp_path: Path) -> None:
    with pytest.raises(SglangSourceError, match="make sglang-cpu"):
        prepared(patchset('python = "no/bin/python"'))
    vllm = parse_patchset(
        'engine = "vllm"\npython = "no/bin/python"\n[[patch]]\nid = "p"\nenv = { A = "1" }\n', tmp_path / "set.toml"
    )
    with pytest.raises(SglangSourceError, match=r"pip install vllm.*docs/sglang\.md") as caught:
        make_trees(vllm, ENGINES["vllm"], threads=1)
    assert "make sglang-cpu" not in str(caught.value)
    with pytest.raises(SglangSourceError, match="has no sglang"):
        prepared(patchset(f'python = "{sys.executable}"', source=""))


# Builds


def test_each_build_is_its_own_tree_and_a_diff_may_name_python_or_not(patchset: Callable[..., PatchSet]) -> None:
    patches = "".join(
        f'[[patch]]\nid = "{name}"\ndiffs = ["{name}.diff"]\n' for name in ("other-answer", "other-backend")
    )
    made = prepared(patchset(patches=patches))
    base, answer, backend = made["base"], made["other-answer"], made["other-backend"]
    assert base.tree and answer.tree and backend.tree and len({base.tree, answer.tree, backend.tree}) == 3
    assert made["base-again"].tree == base.tree
    assert (answer.tree / "sglang/answer.py").read_text() == "ANSWER = '43'\n"
    assert (base.tree / "sglang/answer.py").read_text() == "ANSWER = '42'\n"
    assert (answer.tree / "sglang/backend.py").samefile(base.tree / "sglang/backend.py")
    assert (answer.tree / "sglang/kernel.cuh").samefile(base.tree / "sglang/kernel.cuh")
    assert (backend.tree / "sglang/backend.py").read_text().endswith('BACKEND = "torch_native"\n')
    assert answer.env["PYTHONPATH"] == str(answer.tree) and answer.env["PYTHONSAFEPATH"] == "1"


def test_a_hunk_that_does_not_fit_is_an_error_with_base_file_and_line(
    patchset: Callable[..., PatchSet], tree: Path, tmp_path: Path
) -> None:
    diff = tmp_path / "other-answer.diff"
    diff.write_text(diff.read_text().replace("'42'", "'41'"))
    with pytest.raises(BuildError, match=r"^patch 'p' on sglang 0\.0\.1: .*answer.py hunk 1 does not apply at line 1"):
        prepared(patchset())
    shutil.rmtree(next(tree.glob("sglang-*.dist-info")))  # as a checkout that was never built
    with pytest.raises(BuildError, match=r"^patch 'p': .*answer.py hunk 1 does not apply at line 1"):
        prepared(patchset())


def test_model_overrides_are_merged_into_one_argument(patchset: Callable[..., PatchSet]) -> None:
    patches = '[[patch]]\nid = "p"\nmodel_override = { index_topk = 1024 }\n'
    made = prepared(patchset("model_override = { index_topk = 512, routed_scaling_factor = 2.5 }", patches=patches))
    override = made["p"].command[made["p"].command.index("--json-model-override-args") + 1]
    assert json.loads(override) == {"index_topk": 1024, "routed_scaling_factor": 2.5}
    assert made["p"].command.count("--json-model-override-args") == 1
    assert json.loads(made["base"].command[-1]) == {"index_topk": 512, "routed_scaling_factor": 2.5}


def test_a_source_patcher_file_is_handed_over_by_content(patchset: Callable[..., PatchSet], tmp_path: Path) -> None:
    (tmp_path / "edits.yaml").write_text("patches: []\n")
    made = prepared(patchset(patches='[[patch]]\nid = "p"\nsource_patcher = "edits.yaml"\n'))
    file = Path(made["p"].env["DUMPER_SOURCE_PATCHER_CONFIG"])
    (tmp_path / "edits.yaml").write_text("patches: [edited later]\n")
    assert file.read_text() == "patches: []\n"
    assert "DUMPER_SOURCE_PATCHER_CONFIG" not in made["base"].env
    with pytest.raises(PatchsetError, match=r"source_patcher .none\.yaml. is not a file"):
        patchset(patches='[[patch]]\nid = "p"\nsource_patcher = "none.yaml"\n')


def test_a_build_command_works_on_copies_and_what_it_leaves_is_part_of_the_build(
    patchset: Callable[..., PatchSet],
) -> None:
    command = '["sh", "-c", "echo compiled > sglang/_ops.so; echo \\"ANSWER = 7\\" > sglang/answer.py"]'
    made = prepared(patchset(patches=f'[[patch]]\nid = "p"\nbuild_command = {command}\n'))
    tree, base = made["p"].tree, made["base"].tree
    assert tree and base and (tree / "sglang/_ops.so").read_text() == "compiled\n"
    assert (base / "sglang/answer.py").read_text() == "ANSWER = '42'\n"
    manifest, of_base = made["p"].build.manifest, made["base"].build.manifest
    assert manifest and of_base and manifest.tree_hash != of_base.tree_hash
    with pytest.raises(BuildError, match=r"ended with code 3:\n    no compiler"):
        prepared(patchset(patches='[[patch]]\nid = "p"\nbuild_command = ["sh", "-c", "echo no compiler; exit 3"]\n'))


def test_a_build_command_that_leaves_time_and_size_alike_is_not_served_old_bytecode(
    patchset: Callable[..., PatchSet], tree: Path
) -> None:
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(tree / "sglang")], check=True)
    command = "touch -r sglang/answer.py then; sed -i s/42/43/ sglang/answer.py; touch -r then sglang/answer.py"
    p = prepared(patchset(patches=f'[[patch]]\nid = "p"\nbuild_command = ["sh", "-c", "{command}"]\n'))["p"]
    program = "from sglang.answer import ANSWER; print(ANSWER)"
    done = subprocess.run([sys.executable, "-c", program], env=p.env, capture_output=True, text=True, check=True)
    assert done.stdout == "43\n"


def test_bytecode_is_shared_for_unchanged_modules_alone(tmp_path: Path, tree: Path) -> None:
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(tree / "sglang")], check=True)
    copy = tmp_path / "copy"
    for name in ("answer.py", "backend.py"):
        (copy / "sglang").mkdir(parents=True, exist_ok=True)
        os.link(tree / "sglang" / name, copy / "sglang" / name)
    (copy / "sglang/answer.py").unlink()
    (copy / "sglang/answer.py").write_text("ANSWER = 'other'\n")
    share_bytecode(tree, copy, ("sglang",))
    assert [path.name.partition(".")[0] for path in copy.rglob("*.pyc")] == ["backend"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('deployment = { kind = "pdd" }', "did you mean 'pd'"),
        ('deployment = { kind = "pd", prefil = 1 }', "did you mean 'prefill'"),
        ('deployment = { kind = "pd", decode = 0 }', "decode = 0 is not a positive whole number"),
        ("deployment = { decode = 1 }", "'kind' is missing"),
        ("model_override = 3", "is not a table"),
    ],
)
def test_a_wrong_key_of_the_patchset_is_named(text: str, said: str, patchset: Callable[..., PatchSet]) -> None:
    with pytest.raises(PatchsetError) as caught:
        patchset(text)
    assert said in str(caught.value)


def test_keys_for_sglang_are_refused_for_other_engines(tmp_path: Path) -> None:
    for line in ('python = "x"', "model_override = { a = 1 }", 'deployment = { kind = "pd" }', 'source = "x"'):
        text = f'engine = "reference"\n{line}\n[[patch]]\nid = "p"\nenv = {{ A = "1" }}'
        with pytest.raises(PatchsetError, match="sglang"):
            engine_of(parse_patchset(text, tmp_path / "x.toml"))


# What the server says of itself


def serve(build: PreparedBuild, folder: Path) -> dict[str, object]:
    server = Server(build.build.build_id, build.command, build.env, folder, HeldPort())
    try:
        server.start()

        async def ask() -> dict[str, object]:
            await server.wait_ready(30.0)
            return await server_info(server.name, server.url, "/server_info")

        info = asyncio.run(ask())
    finally:
        server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", trust_env=False)
    return info


def test_a_server_that_silently_took_another_backend_is_caught(
    patchset: Callable[..., PatchSet], tmp_path: Path
) -> None:
    patches = '[[patch]]\nid = "p"\ndiffs = ["other-backend.diff"]\n'
    asked = patchset('args = ["--attention-backend", "flashinfer"]', patches=patches)
    made = prepared(asked)
    told = {name: serve(made[name], tmp_path / name) for name in ("base", "p")}
    args = made["p"].build.manifest.args if made["p"].build.manifest else ()
    assert ENGINE.contradictions(args, told["base"]) == []
    assert ENGINE.contradictions(args, told["p"]) == [
        "--attention-backend flashinfer: the server runs 'torch_native'",
    ]
    # Without the flag nothing was asked for, and the report still differs from the base's.
    quiet = patchset(patches=patches)
    made = prepared(quiet)
    told = {name: serve(made[name], tmp_path / f"{name}-quiet") for name in ("base", "p")}
    builds = [with_server_info(made[name].build, told[name]) for name in ("base", "p")]
    with pytest.raises(BuildError, match=r"p: server_info attention_backend: base 'triton', here 'torch_native'"):
        check_builds(builds, quiet, ENGINE)
    meant = patchset(patches=patches + 'changes = ["attention_backend"]\n')
    check_builds(builds, meant, ENGINE)


def test_two_starts_of_one_build_say_the_same_and_no_secret_is_kept(
    patchset: Callable[..., PatchSet], tmp_path: Path
) -> None:
    asked = patchset()
    made = prepared(asked)
    told = {name: serve(made[name], tmp_path / name) for name in ("base", "base-again", "p")}
    check_builds([with_server_info(made[name].build, told[name]) for name in told], asked, ENGINE)
    assert told["base"]["startup_time"] != told["base-again"]["startup_time"]
    assert "very-secret" not in json.dumps(told)
    asked = {"states": [{"api_key": "k", "model_path": f"{Path.home()}/m"}], "n": 3}
    assert without_secrets(asked)["n"] == 3
    assert without_secrets(asked)["states"] == [{"api_key": "sha256:8254c329a928", "model_path": "~/m"}]


def test_flags_are_found_in_the_report_under_sglangs_own_names() -> None:
    args = ("--tp", "2", "--page-size=64", "--disable-radix-cache", "--cuda-graph-bs", "1", "2", "--page-size", "16")
    assert dict(sglang.flags(args)) == {
        "tp_size": "2", "page_size": "16", "disable_radix_cache": None, "cuda_graph_bs": "1 2",
    }  # fmt: skip
    told = {"tp_size": 2, "page_size": 16, "disable_radix_cache": True, "cuda_graph_bs": [1, 2]}
    assert sglang.contradictions(args, told) == []
    wrong = {"tp_size": 1, "page_size": 64, "disable_radix_cache": False, "cuda_graph_bs": [1]}
    assert len(sglang.contradictions(args, wrong)) == 4


@given(st.dictionaries(st.sampled_from(["a-b", "c", "d-e-f"]), st.integers(0, 99) | st.none(), min_size=1))
def test_a_report_that_repeats_the_flags_never_contradicts_them(given_flags: dict[str, int | None]) -> None:
    args: list[str] = []
    for name, value in given_flags.items():
        args += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    told = {name.replace("-", "_"): True if value is None else value for name, value in given_flags.items()}
    assert sglang.contradictions(tuple(args), told) == []
    for name, value in told.items():
        other = told | {name: "other" if value is True else value + 1}  # type: ignore[operator]
        assert len(sglang.contradictions(tuple(args), other)) == 1


def test_the_log_says_what_the_report_leaves_at_auto() -> None:
    log = (
        "[x] Attention backend not specified. Use torch_native backend by default.\n"
        "[x] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 16384, K size: 0.14 GB\n"
        "[x] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 16384\n"
    )
    assert sglang.told_by_log(log) == {
        "kv_cache_dtype": "torch.bfloat16 / torch.float8_e4m3fn", "attention_backend": "torch_native",
    }  # fmt: skip
    assert sglang.told_by_log("nothing of the kind") == {}


def test_a_begun_answer_carries_what_the_template_puts_before_it(planted: object, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    ruler = Ruler.from_folder(tmp_path)
    (conversation,) = planted.make(1)  # type: ignore[attr-defined]
    ask = conversation.asks[0]
    plain = planted.messages_for(conversation, ask)  # type: ignore[attr-defined]
    messages = after_generation_prompt(ruler)(plain)
    assert messages[-1] == {"role": "assistant", "content": " The code of N0x0 is"}
    opened = ruler.render(messages[:-1], add_generation_prompt=True)
    assert opened + messages[-1]["content"] == ruler.render(plain, continue_final_message=True)


# Launch plans


def test_prefill_and_decode_are_planned_with_every_port_and_gpu(patchset: Callable[..., PatchSet]) -> None:
    asked = patchset(
        'args = ["--page-size", "64"]\n'
        'deployment = { kind = "pd", prefill = 2, decode = 1, gpus_per_server = 2, transfer_backend = "nixl" }'
    )
    plans = launch_plans(list(prepared(asked).values()), asked.deployment, first_port=31_000)
    assert [plan.build_id for plan in plans] == ["base", "base-again", "p"]
    plan = plans[0]
    assert [process.name for process in plan.processes] == ["prefill-0", "prefill-1", "decode-0", "router"]
    first, second, decode, router = plan.processes
    assert first.command[-14:] == (
        "--page-size", "64", "--base-gpu-id", "0", "--nccl-port", "31001", "--tp-size", "2",
        "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl",
        "--disaggregation-bootstrap-port", "31002",
    )  # fmt: skip
    assert [process.gpus for process in plan.processes] == [(0, 1), (2, 3), (4, 5), ()]
    assert "--disaggregation-bootstrap-port" not in decode.command and "decode" in decode.command
    assert router.command[1:] == (
        "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(router.port),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(router.other_ports[0]), "--disable-retries",
        "--pd-disaggregation",
        "--prefill", first.url, "31002", "--prefill", second.url, str(second.other_ports[1]),
        "--decode", decode.url, "--policy", "cache_aware",
    )  # fmt: skip
    assert plan.endpoint == router.url and plan.missing == ("sglang-router", "nixl")
    assert first.env["SGLANG_HOST_IP"] == "127.0.0.1"
    used = [port for plan in plans for p in plan.processes for port in (p.port, *p.other_ports)]
    assert len(used) == len(set(used))
    assert plans[2].processes[0].env["PYTHONPATH"] != first.env["PYTHONPATH"]
    text = shell_text(plan)
    assert "# not in the serving environment: sglang-router, nixl" in text and "PYTHONPATH=" in text


def test_replicas_are_planned_behind_the_router(patchset: Callable[..., PatchSet]) -> None:
    asked = patchset('deployment = { kind = "replicas", replicas = 3, policy = "round_robin" }')
    plan = launch_plans(list(prepared(asked).values()), asked.deployment)[0]
    *servers, router = plan.processes
    assert [server.name for server in servers] == ["replica-0", "replica-1", "replica-2"]
    urls = tuple(server.url for server in servers)
    assert router.command[-6:] == ("--worker-urls", *urls, "--policy", "round_robin")
    assert not any("disaggregation" in part for server in servers for part in server.command)
    with pytest.raises(ValueError, match="no port is left"):
        launch_plans(list(prepared(asked).values()), asked.deployment, first_port=65_530)


def test_a_dry_run_prints_commands_and_starts_nothing(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pd.toml"
    path.write_text(
        'engine = "sglang"\nsource = "base"\ndeployment = { kind = "pd" }\n'
        '[[patch]]\nid = "p"\ndiffs = ["other-answer.diff"]\n'
    )
    builds_command(path, as_json=False, dry_run=True, first_port=32_000, model_folder="/models/x")
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("# build ") for line in lines) == 3
    assert sum("--disaggregation-mode prefill" in line for line in lines) == 3
    assert all("--model-path /models/x" in line for line in lines if "launch_server" in line)
    builds_command(path, as_json=True, dry_run=True, first_port=32_000, model_folder="/models/x")
    plans = json.loads(capsys.readouterr().out)
    assert [process["name"] for process in plans[0]["processes"]] == ["prefill-0", "decode-0", "router"]


def group_of(patchset: PatchSet, folder: Path) -> Server:
    engine = engine_of(patchset)
    return engine.server(prepared(patchset)["base"], patchset, folder, 0)


@pytest.mark.parametrize("deployment", ['kind = "replicas", replicas = 2', 'kind = "pd"'])
def test_a_deployment_is_started_watched_and_stopped_as_one_server(
    deployment: str, patchset: Callable[..., PatchSet], tmp_path: Path
) -> None:
    fake_sglang.write_environment(tmp_path / "env")  # type: ignore[attr-defined]
    asked = patchset(f'python = "env/bin/python"\ndeployment = {{ {deployment} }}')
    group = group_of(asked, tmp_path / "served")
    urls = {**group.info_urls(), "router": group.url}
    try:
        group.start()
        asyncio.run(group.wait_ready(60.0))
        group.check_alive()
        body = {"model": "x", "messages": [{"role": "user", "content": "?"}]}
        reply = httpx.post(f"{group.url}/v1/chat/completions", json=body, trust_env=False).json()
        assert reply["choices"][0]["message"]["content"] == "42"
        told = {name: asyncio.run(server_info(name, url, "/server_info")) for name, url in group.info_urls().items()}
        modes = [info["disaggregation_mode"] for info in told.values()]
        assert modes == (["prefill", "decode"] if "pd" in deployment else ["null", "null"])
        member = next(iter(group._members.values()))  # type: ignore[attr-defined]
        member.stop()
        with pytest.raises(ServerError, match=rf"build {member.name}: the server"):
            group.check_alive()
        assert group.exit_code() is not None
    finally:
        group.stop()
    group.stop()
    for url in urls.values():
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", trust_env=False)


def test_a_deployment_without_a_router_says_what_to_install(patchset: Callable[..., PatchSet], tmp_path: Path) -> None:
    fake_sglang.write_environment(tmp_path / "env", router=False)  # type: ignore[attr-defined]
    asked = patchset('python = "env/bin/python"\ndeployment = { kind = "replicas" }')
    with pytest.raises(ServerError, match="pip install sglang-router"):
        group_of(asked, tmp_path / "served")


def test_gpus_bound_how_many_builds_are_served_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,5")
    pd = Deployment(kind="pd", gpus_per_server=2)
    assert builds_at_once(("--tp", "2"), None) == 2 and gpus_of(1, ("--tp", "2"), None) == ("2", "5")
    assert builds_at_once((), None) == 4 and gpus_of(3, (), None) == ("5",)
    assert builds_at_once((), pd) == 1 and gpus_of(0, (), pd) == ("0", "1", "2", "5")
    assert builds_at_once(("--tp-size=8",), None) == 1
    assert builds_at_once(("--device", "cpu"), None) is None and gpus_of(1, ("--device", "cpu"), None) == ()


# The environment for the CPU, and its model


def test_the_stand_ins_answer_for_compiled_packages_and_nothing_else() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(sglang_shim.__file__).parent)!r})
import sglang_shim; sglang_shim.install(); sglang_shim.install()
assert sum(type(f).__name__ == "Finder" for f in sys.meta_path) == 1
from sgl_kernel import rmsnorm
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional
InterpolationMode.BICUBIC, functional.resize
for act in (rmsnorm, lambda: __import__("sgl_kernel.scalar_type"), lambda: __import__("no_such_package")):
    try: act()
    except (NotImplementedError, ImportError) as problem: print(type(problem).__name__, problem)
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "NotImplementedError sgl_kernel.rmsnorm is compiled code, and this environment has a stand-in for its package"
    )
    assert [line.split()[0] for line in lines[1:]] == ["ModuleNotFoundError", "ModuleNotFoundError"]


def test_sglang_is_never_installed_into_our_own_environment(tmp_path: Path) -> None:
    with pytest.raises(sglang_install.SglangInstallError, match="one of its own"):
        sglang_install.install(Path(sys.prefix))
    assert not sglang_install.is_complete(tmp_path)


def test_a_download_that_fails_is_tried_again_and_then_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_install, "_PAUSE_S", 0.0)
    python = sglang_install.python_of(tmp_path / "env")
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "calls"}\necho "the connection broke" >&2\nexit 1\n')
    python.chmod(0o755)
    said = r"installing torch for the CPU failed with code 1:\nthe connection broke\n\(tried 3 times\)"
    with pytest.raises(sglang_install.SglangInstallError, match=said):
        sglang_install.install(tmp_path / "env", say=False)
    assert (tmp_path / "calls").read_text().count("torch==") == 3 and not sglang_install.is_complete(tmp_path / "env")


def test_the_converted_weights_have_huggingfaces_names_and_norms() -> None:
    raw = {"token_embd.weight": torch.ones(4, 2), "output_norm.weight": torch.full((2,), 1.5)}
    for name in (*sglang_model._NORMS, *sglang_model._MATRICES):
        raw[f"blk.0.{name}.weight"] = torch.full((2,), 1.25) if name in sglang_model._NORMS else torch.ones(2, 2)
    made = sglang_model.converted(raw, layers=1)
    assert len(made) == len(raw) and {tensor.dtype for tensor in made.values()} == {torch.bfloat16}
    assert made["model.norm.weight"].tolist() == [0.5, 0.5]
    assert made["model.layers.0.self_attn.q_norm.weight"].tolist() == [0.25, 0.25]
    assert made["model.layers.0.mlp.down_proj.weight"].shape == (2, 2)
