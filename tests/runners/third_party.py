"""For tests that serve an engine for real: a campaign from a patchset to its report, every arm asked of one server,
and what is left running.
"""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longrecall.needles.plant import concat_twin, make_conversations, make_haystack
from longrecall.needles.recipes import recipe
from longrecall.needles.render import Ruler
from longrecall.results.run_folder import load_replays
from longrecall.runners.client import connect
from longrecall.runners.engines import ROOT, Engine
from longrecall.runners.gold import GoldScorer
from longrecall.runners.journal import Journal
from longrecall.runners.prompts import make_prompts
from longrecall.runners.replay import ReplayPlan, replay
from longrecall.runners.schema import Arm, Replay


@dataclass(frozen=True)
class Campaign:
    """A finished campaign."""

    run_dir: Path
    report: dict[str, Any]
    replays: list[dict[str, Any]]
    stderr: str

    @property
    def verdicts(self) -> dict[str, str]:
        return {verdict["patch"]: verdict["verdict"] for verdict in self.report["verdicts"]}

    @property
    def said(self) -> str:
        """For a failure: the verdicts with their reasons, and how the campaign's own words end."""
        lines = [f"{v['patch']}: {v['verdict']}: {v['reason']}" for v in self.report["verdicts"]]
        lines += [f"control {name}: {c['passed']}: {c['detail']}" for name, c in self.report["controls"].items()]
        return "\n".join([*lines, self.stderr[-2000:]])


def campaign(patchset: Path, runs: Path, timeout_s: float, *args: str) -> Campaign:
    """Run `longrecall eval`; fails with the end of its output when it does not end well and in time."""
    command = [sys.executable, "-m", "longrecall.results.main", "eval", str(patchset), "--runs-dir", str(runs), *args]
    env = os.environ | {"PYTHONPATH": str(ROOT / ".ns")}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # it stops its servers in order
        _, stderr = process.communicate(timeout=60)
        raise AssertionError(f"not done after {timeout_s:.0f} s:\n{stderr[-3000:]}") from None
    assert process.returncode == 0, f"ended with code {process.returncode}:\n{stderr[-3000:]}"
    (run_dir,) = runs.iterdir()
    replays = [json.loads(line) for line in (run_dir / "replays.jsonl").read_text().splitlines()]
    return Campaign(run_dir, json.loads((run_dir / "report.json").read_text()), replays, stderr)


def in_every_arm(
    url: str, engine: Engine, model: Path, folder: Path, arms: tuple[Arm, ...], *, name: str = "", page_tokens: int = 1
) -> list[Replay]:
    """One conversation asked of a running server in these arms, right answers scored where the engine can.

    What every arm must get from the cache is checked here: nothing where it is cold, else what it wanted.
    """
    ruler = Ruler.from_folder(model)
    haystack = make_haystack(recipe("reference"), ruler, 3)
    made = make_conversations(
        recipe("reference"), ruler=ruler, rungs=(512, 640), count=1, seed=3, haystack=haystack
    )  # fmt: skip
    conversations = {item.conversation_id: item for item in made}
    twins = {name: concat_twin(item, haystack) for name, item in conversations.items()}
    prompts = make_prompts(ruler, twins, after_prompt=engine.begun_after_generation_prompt)
    prompts = replace(prompts, page_tokens=page_tokens)
    assert prompts.encode is not None
    gold = GoldScorer(route=engine.gold_route, encode=prompts.encode) if engine.gold_route else None
    plan = ReplayPlan(
        run_id="arms", build_ids=("base",), conversations=conversations, conversation_order=tuple(conversations),
        block_size=1, arms=arms, max_tokens=8, conversations_at_once=1, whole_ladder=engine.shares_prefill,
    )  # fmt: skip

    async def go() -> None:
        journal = Journal(folder)
        try:
            async with connect(
                "base", url, model=name or engine.name, timeout_s=300.0, echoes_begun_answer=engine.echoes_begun_answer,
                begun_after_generation_prompt=engine.begun_after_generation_prompt,
            ) as endpoint:  # fmt: skip
                await replay(plan, {"base": endpoint}, journal, parallel=1, prompts=prompts, gold=gold)
        finally:
            journal.close()

    asyncio.run(go())
    replays = load_replays(folder)
    assert len(replays) == plan.n_planned and {r.arm for r in replays} == set(arms)
    assert [r.response.error for r in replays if r.response.error] == []
    if gold is not None:
        assert not gold.problems and all(r.response.gold_logprobs for r in replays)
    for r in replays:
        told, wanted = r.response.cached_tokens, r.response.cached_at_least
        assert told is not None
        assert told == 0 if r.arm == "cold" else wanted is None or told >= wanted, (r.arm, told, wanted)
    assert all(r.response.cached_at_least for r in replays if r.arm == "branched")
    assert "free" not in arms or (folder / "histories.jsonl").stat().st_size > 0
    return replays


def working_in(folder: Path) -> list[str]:
    """Command lines of the living processes that work in this folder or below it, as servers do in their run's."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                found.append((entry / "cmdline").read_text("utf-8", "replace").replace("\0", " "))
        except OSError:
            continue
    return found
