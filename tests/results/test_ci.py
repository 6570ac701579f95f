"""The workflow files of docs/ci are run step by step, in a real repository with a real remote."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
DOCS = Path(__file__).parents[2] / "docs" / "ci"


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


class Machine:
    """A checkout with a remote, `longrecall` on PATH, and `gh` replaced by a recorder."""

    def __init__(self, root: Path, run_dirs: dict[str, Path]) -> None:
        self.root, self.run_dirs = root, run_dirs
        self.repo, tools = root / "repo", root / "bin"
        tools.mkdir(parents=True)
        # measuring takes minutes and servers; the rest of the command line is the real one
        script(
            tools / "longrecall",
            f'#!/bin/sh\nif [ "$1" = eval ]; then mkdir -p results/runs && cp -r "$MEASURED" results/runs/; exit; fi\n'
            f'exec "{sys.executable}" -m longrecall.results.main "$@"\n',
        )
        script(tools / "gh", f'#!/bin/sh\nprintf "%s\\n" "$@" > "{root}/gh.txt"\n')
        # the only longrecall there is to install is a checkout, and extras are those of its pyproject.toml
        script(
            tools / "pip",
            '#!/bin/sh\necho "$*" >> "$HOME/pip.txt"\nwhat="${2%]}"\ncase "$what" in .* | */*) ;; *) exit 1 ;; esac\n'
            'test "$1" = install && grep -q "^${what##*[} = " "${what%[*}/pyproject.toml"\n',
        )
        self.env = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOME": str(root),
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "GIT_CONFIG_GLOBAL": "/dev/null",
        }
        subprocess.run(["git", "init", "-q", "-b", "main", "--bare", str(root / "origin.git")], check=True, timeout=60)
        subprocess.run(["git", "clone", "-q", str(root / "origin.git"), str(self.repo)], check=True, timeout=60)
        shutil.copy(DOCS.parents[1] / "pyproject.toml", self.repo)
        self.sh(
            "git add . && git -c user.name=t -c user.email=t@example.org commit -q -m start && git push -q origin main"
        )

    def sh(self, command: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-e", "-c", command],
            cwd=self.repo,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )

    def measured(self, name: str) -> dict[str, str]:
        shutil.rmtree(self.repo / "results", ignore_errors=True)
        return {"MEASURED": str(self.run_dirs[name])}


@pytest.fixture(scope="module")
def run_dirs(
    tmp_path_factory: pytest.TempPathFactory, simulated: Callable[..., Any], run_writer: Callable[..., Path]
) -> dict[str, Path]:
    """Three finished runs on one suite: two of a sound commit, one of a commit whose base lost recall."""
    folder = tmp_path_factory.mktemp("runs")
    innocent = {"base": (0, 0), "base-again": (0, 0), "topk-256": (0, 0.45), "noop": (0, 0)}
    worse = {name: (below, above + 0.3) for name, (below, above) in innocent.items()}
    made = {}
    for name, losses in (("first", innocent), ("second", innocent), ("worse", worse)):
        campaign = simulated(run_id=name, conversations=26, probes=5, losses=losses, seed=4, flips=0.002)
        made[name] = run_writer(folder / name, campaign)
    return made


def github_steps(machine: Machine, ref: str, **env: str) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run the steps that GitHub would run for that ref, stopping like it after a failure except for always()."""
    workflow = yaml.safe_load((DOCS / "github.yml").read_text())
    job = workflow["jobs"]["recall"]
    known = {k: str(v) for k, v in job["env"].items() if "${{" not in str(v)}
    known |= {"LONGRECALL_ROWS": "history-rows", "PULL_REQUEST": "7", **env}
    done: dict[str, subprocess.CompletedProcess[str]] = {}
    failed = False
    for step in job["steps"]:
        condition = step.get("if", "success()")
        wanted = ("refs/heads/main" not in condition or ref == "refs/heads/main") and (
            "pull_request" not in condition or ref.startswith("refs/pull")
        )
        if "run" not in step or not wanted or (failed and "always()" not in condition):
            continue
        assert "${{" not in step["run"]
        done[step["name"]] = machine.sh(step["run"], **known)
        failed = failed or done[step["name"]].returncode != 0
    return done


def test_github_workflow_from_first_run_to_a_caught_regression(tmp_path: Path, run_dirs: dict[str, Path]) -> None:
    machine = Machine(tmp_path / "m", run_dirs)
    summary = tmp_path / "summary.md"
    main = {"GITHUB_STEP_SUMMARY": str(summary)}

    done = github_steps(machine, "refs/heads/main", LONGRECALL_COMMIT="a" * 40, **main, **machine.measured("first"))
    assert {name: step.returncode for name, step in done.items() if step.returncode} == {}, done
    assert "recall-history" in machine.sh("git ls-remote origin").stdout
    pin = machine.sh(
        "longrecall history baseline main first --reason 'first run' && git push -q origin recall-history",
        LONGRECALL_STORE="git:.#recall-history",
        LONGRECALL_ROWS="history-rows",
    )
    assert pin.returncode == 0, pin.stderr

    done = github_steps(machine, "refs/heads/main", LONGRECALL_COMMIT="b" * 40, **main, **machine.measured("second"))
    assert {name: step.returncode for name, step in done.items() if step.returncode} == {}, done["Gate"].stderr
    verdicts = json.loads(done["Gate"].stdout.splitlines()[-1])["verdicts"]
    assert verdicts == {"base@" + "b" * 20: "exonerated"}

    pull = {"LONGRECALL_COMMIT": "c" * 40, "GITHUB_STEP_SUMMARY": str(summary)}
    done = github_steps(machine, "refs/pull/7/merge", **pull, **machine.measured("worse"))
    assert done["Gate"].returncode == 1, done["Gate"].stderr
    assert "Remember" not in done
    assert done["Comment"].returncode == 0
    assert (tmp_path / "m" / "gh.txt").read_text().splitlines()[:3] == ["pr", "comment", "7"]
    comment = (machine.repo / "comment.md").read_text()
    assert comment.startswith("<!-- longrecall gate -->")
    assert "❌ culprit" in comment
    assert summary.read_text().count("### ") == 3
    root = ET.parse(machine.repo / "recall.xml").getroot()
    suite = next(s for s in root if s.get("name", "").startswith("base@ccc"))
    assert [(c.get("name"), [e.tag for e in c if e.tag != "properties"]) for c in suite] == [
        ("recall at 448 tokens", ["skipped"]),
        ("recall at 1024 tokens", ["failure"]),
        ("recall at 2048 tokens", ["failure"]),
    ]
    assert (machine.repo / "site" / "trend.html").is_file()
    assert re.search(r'"name": "base / recall at 2048"', (machine.repo / "benchmark.json").read_text())


def test_longrecall_is_installed_from_the_checkout_or_from_where_it_is_said_to_be(
    tmp_path: Path, run_dirs: dict[str, Path]
) -> None:
    machine = Machine(tmp_path / "m", run_dirs)
    github = yaml.safe_load((DOCS / "github.yml").read_text())["jobs"]["recall"]
    gitlab = yaml.safe_load((DOCS / "gitlab.yml").read_text())["recall"]
    github_install = next(step["run"] for step in github["steps"] if step.get("name") == "Install")
    (machine.repo / "third_party" / "longrecall").mkdir(parents=True)
    shutil.copy(DOCS.parents[1] / "pyproject.toml", machine.repo / "third_party" / "longrecall")
    for install, variables in ((github_install, github["env"]), (gitlab["before_script"][0], gitlab["variables"])):
        for source in (variables["LONGRECALL_SOURCE"], "third_party/longrecall"):
            done = machine.sh(install, LONGRECALL_SOURCE=source)
            assert done.returncode == 0, (source, done.stderr)
    assert (tmp_path / "m" / "pip.txt").read_text().split() == [
        *("install", ".[history]", "install", "third_party/longrecall[history]") * 2
    ]


def test_first_pull_request_of_a_repository_without_history(tmp_path: Path, run_dirs: dict[str, Path]) -> None:
    machine = Machine(tmp_path / "m", run_dirs)
    pull = {"LONGRECALL_COMMIT": "c" * 40, "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    done = github_steps(machine, "refs/pull/7/merge", **pull, **machine.measured("first"))
    assert {name: step.returncode for name, step in done.items() if step.returncode} == {}, done


def test_rows_outlive_a_job_on_a_machine_that_is_thrown_away() -> None:
    job = yaml.safe_load((DOCS / "github.yml").read_text())["jobs"]["recall"]
    kept = [step for step in job["steps"] if step.get("uses", "").startswith("actions/cache/")]
    assert [step["uses"].split("@")[0].rsplit("/", 1)[1] for step in kept] == ["restore", "save"]
    assert all(f"|| '{step['with']['path']}'" in job["env"]["LONGRECALL_ROWS"] for step in kept)
    assert "always()" in kept[1]["if"]  # a run that fails the gate is part of the history too
    names = [step.get("name", step.get("uses")) for step in job["steps"]]
    assert names.index("Remember") < names.index(kept[1]["uses"])
    gitlab = yaml.safe_load((DOCS / "gitlab.yml").read_text())["recall"]
    assert gitlab["cache"]["paths"] == [f"{gitlab['variables']['LONGRECALL_ROWS']}/"]
    assert gitlab["cache"]["when"] == "always"


def test_gitlab_job(tmp_path: Path, run_dirs: dict[str, Path]) -> None:
    machine = Machine(tmp_path / "m", run_dirs)
    job = yaml.safe_load((DOCS / "gitlab.yml").read_text())["recall"]
    branch = {"CI_COMMIT_BRANCH": "main", "CI_DEFAULT_BRANCH": "main", "CI_COMMIT_SHA": "a" * 40}
    variables = {k: str(v) for k, v in job["variables"].items()}
    program = "\n".join([*job["before_script"], *job["script"]])
    done = machine.sh(program, **variables, **branch, **machine.measured("first"))
    assert done.returncode == 0, done.stderr
    metrics = (machine.repo / job["artifacts"]["reports"]["metrics"]).read_text()
    assert 'longrecall_recall{build="base",length="2048"}' in metrics
    assert metrics.endswith("# EOF\n")
    assert (machine.repo / job["artifacts"]["reports"]["junit"]).is_file()
    listed = machine.sh("longrecall history list --json", **variables)
    assert {entry["commit"] for entry in json.loads(listed.stdout)} == {"a" * 40}
