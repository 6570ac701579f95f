"""`longrecall calibrate --reference`: known faults in a real model, served, judged and attributed; how often rightly?

    drawn       at random from runners/reference/faults.py, a patchset of real diffs, served like any `longrecall eval`
    sorted      those that cost recall here are attributed; the others must not be convicted, and are told apart
    judged      each as the one patch of a campaign with base, base again and the positive control
    attributed  from the ladder, then with the arms that attribution asks for, served in rounds

Everything is kept in one folder and goes on where it was broken off. The selection keeps 272 tokens here instead of
512, so that prompts of 256 and 832 tokens stand on both sides of its onset and a fault costs seconds to serve.
"""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from scipy import stats

from longrecall.evals.attribute import REPAIRS, family_probabilities
from longrecall.evals.explain import attribute_patches
from longrecall.evals.next_arm import suffixes_of, write_arms
from longrecall.evals.schema import Attribution, Comparison, Verdict
from longrecall.evals.stored_run import StoredRun, load_run
from longrecall.evals.verdict import judge
from longrecall.results import run_folder
from longrecall.results.campaign import run_campaign
from longrecall.results.in_process import gather_evidence
from longrecall.results.plan import Options
from longrecall.results.watching import Watcher
from longrecall.runners.engines import ROOT
from longrecall.runners.reference.faults import FAULTS, ReferenceFault, fault_diff

ONSET_TOKENS = 272
RUNGS = (256, 832)
MARGIN = 0.2
"""Excluded by 11 conversations at the least; half of what the base recalls, and far less than the control loses."""
LEAST_LOSS = 0.10
"""A fault that costs less than this at every rung is counted with the harmless ones."""
RECIPE = """\
name = "calibration"
answer_prefix = true
split = "heldout"
[[elements]]
kind = "keys"
count = 5
distractors = 5
"""
CONTROL, OTHER_CONTROL = "scaling-twice-hash", "scaling-twice"
"""Faults of the catalogue that are known-bad builds in the judgement of all others, and of the first."""
NOT_SERVED = ("residue", "unrepeatable", "concat_recovers")
"""Arms that ask other questions, or cost more than the rest together: 20 faults are told apart without them, or not at
all. One that is asked for and never served would leave its fault open for good."""


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
    """What `longrecall calibrate --reference` was asked for."""

    folder: Path = Path("results/runs/calibration-reference")
    faults: int = 26
    """Drawn; about one in five costs nothing on this model."""
    seed: int = 0
    unseen: Path | None = None
    """Draw from the faults that the calibration in this folder did not draw."""
    conversations: int = 12
    arm_conversations: int = 4
    rounds: int = 5
    servers_at_once: int | None = None
    parallel: int | None = None


@dataclass(frozen=True, kw_only=True)
class FaultResult:
    """One fault: what it cost, how it was judged, and what it was put down to."""

    name: str
    title: str
    family: str
    """What it is."""
    loss: tuple[float | None, ...]
    """Recall lost at each rung."""
    verdict: str
    attributed: str | None
    """The most probable family; None for a fault that was not drawn."""
    probability: float | None
    cause: str | None
    right: bool | None
    right_from_ladder: bool | None
    """Whether the two rungs alone already named it."""
    arms: tuple[str, ...]
    """What was measured beyond the ladder, in the order it was asked for."""
    served_tokens: int
    """Prompt tokens that its build and its arms computed."""
    sentence: str


@dataclass(frozen=True, kw_only=True)
class ReferenceCalibration:
    """The outcome of a calibration on the reference build."""

    rungs: tuple[int, ...]
    conversations: int
    seed: int
    base_recall: tuple[float | None, ...]
    drawn: tuple[FaultResult, ...]
    harmless: tuple[FaultResult, ...]
    """Faults drawn that cost less than LEAST_LOSS."""
    served_tokens: int
    """Prompt tokens computed, over all builds and arms."""
    replies: int

    @property
    def n_right(self) -> int:
        return sum(bool(f.right) for f in self.drawn)

    def of(self, verdict: str) -> int:
        return sum(f.verdict == verdict for f in self.drawn)

    def within_bars(self) -> bool:
        """18 of 20 attributed to the right cause, no fault exonerated, nothing harmless convicted."""
        enough = self.n_right >= math.ceil(0.9 * len(self.drawn))
        return enough and not self.of("exonerated") and not any(f.verdict == "culprit" for f in self.harmless)


def draw_faults(n: int, seed: int, known: frozenset[str] = frozenset()) -> list[ReferenceFault]:
    """n faults of the catalogue at random (as many as there are), none of the `known`."""
    order = random.Random(f"faults/{seed}").sample(FAULTS, len(FAULTS))
    return [f for f in order if f.name not in known][:n]


def with_controls(drawn: Sequence[ReferenceFault]) -> list[ReferenceFault]:
    """The faults drawn, and behind them the controls that were not."""
    return [*drawn, *(f for f in FAULTS if f not in drawn and f.name in (CONTROL, OTHER_CONTROL))]


def faults_of(folder: Path) -> frozenset[str]:
    """The faults that a finished calibration drew. Raises ValueError when the folder holds none."""
    path = folder / "calibration.json"
    try:
        stored = json.loads(path.read_bytes())
        return frozenset(fault["name"] for fault in (*stored["drawn"], *stored["harmless"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no finished calibration ({error})") from None


def write_catalogue(folder: Path, faults: Sequence[ReferenceFault]) -> Path:
    """Faults as a patchset with its diffs; raises FaultEditError when the source has moved under an edit."""
    (folder / "faults").mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    lines = [
        'name = "calibration"',
        'engine = "reference"',
        f"margin = {MARGIN}",
        f"onset_tokens = {ONSET_TOKENS}",
        f'args = ["--index-topk", "{ONSET_TOKENS}", "--prefix-cache-mb", "320"]',
    ]
    for fault in faults:
        path = folder / "faults" / f"{fault.name}.diff"
        path.write_text(fault_diff(fault, ROOT), encoding="utf-8")
        lines += ["", "[[patch]]", f"id = {json.dumps(fault.name)}", f"title = {json.dumps(fault.title)}"]
        lines += [f"diffs = {json.dumps([f'faults/{path.name}'])}", 'changes = ["key_format"]']
    patchset = folder / "catalogue.toml"
    patchset.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return patchset


def calibrate_reference(options: ReferenceOptions, watcher: Watcher) -> ReferenceCalibration:
    """Serve, judge, attribute; raises RuntimeError when broken off (the same call goes on) or ValueError.

    Writes calibration.json into the folder.
    """
    folder = options.folder
    known = faults_of(options.unseen) if options.unseen else frozenset()
    chosen = draw_faults(options.faults, options.seed, known)
    served = with_controls(chosen)
    patchset = write_catalogue(folder, served)
    run = _serve(options, patchset, folder / "catalogue", options.conversations, watcher)
    verdicts = {fault.name: judge_alone(run, fault.name) for fault in served}
    drawn = [f.name for f in chosen if worst_loss(verdicts[f.name][1]) >= LEAST_LOSS]
    watcher.note(f"{len(drawn)} of the faults drawn cost {100 * LEAST_LOSS:.0f} points or more")
    ladder = attribute_patches([run], drawn, in_process=False, not_next=NOT_SERVED)
    runs, asked = [run], {name: list[str]() for name in drawn}
    open_ = [a.patch for a in ladder if a.next_arm is not None]
    try:
        gather_evidence(run.path, open_, watcher.note)
    except RuntimeError as error:
        watcher.note(f"not measured in-process: {error}")
    for name in open_:
        asked[name].append("in-process")
    for number in range(1, options.rounds + 1):
        wanted = arms_wanted(attribute_patches(runs, drawn, not_next=NOT_SERVED))
        wanted = [(name, suffix) for name, suffix in wanted if suffix not in asked[name]]  # it said nothing once
        if not wanted:
            break
        for name, suffix in wanted:
            asked[name].append(suffix)
        built = {b.build_id for one in runs for b in one.builds}
        bases = sorted({suffix for _, suffix in wanted if f"base--{suffix}" not in built and suffix not in REPAIRS})
        arms, where = [*(("base", suffix) for suffix in bases), *wanted], f"round-{number}"
        write_arms(run.path, arms, folder / f"{where}.toml", name=where, comment="arms that attribution asked for")
        runs.append(_serve(options, folder / f"{where}.toml", folder / where, options.arm_conversations, watcher))
    found = attribute_patches(runs, drawn, not_next=NOT_SERVED)
    result = summarise(options, runs, verdicts, ladder, found, asked)
    run_folder.write_json(folder / "calibration.json", result)
    return result


def _serve(options: ReferenceOptions, patchset: Path, run_dir: Path, conversations: int, watcher: Watcher) -> StoredRun:
    run_campaign(
        Options(
            patchset=patchset,
            rungs=RUNGS,
            conversations=conversations,
            seed=options.seed,
            recipe=str(options.folder / "recipe.toml"),
            run_dir=run_dir,
            runs_dir=run_dir.parent,
            servers_at_once=options.servers_at_once,
            parallel=options.parallel,
        ),
        watcher,
    )
    return load_run(run_dir)


def judge_alone(run: StoredRun, patch: str) -> tuple[Verdict, tuple[Comparison, ...]]:
    """The verdict of one fault as if it had been the only patch of the campaign, with its comparisons.

    The positive control is CONTROL, or OTHER_CONTROL where that is the fault in question.
    """
    control = OTHER_CONTROL if patch == CONTROL else CONTROL
    roles = {patch: "suspect", control: "positive-control"}
    builds = [
        replace(b, role=roles.get(b.build_id, b.role))  # type: ignore[arg-type]
        for b in run.builds
        if b.build_id in roles or b.role in ("base", "aa")
    ]
    rows = run.scores.filter(pc.is_in(run.scores["build_id"], pa.array([b.build_id for b in builds])))
    judgement = judge(rows, builds, rungs=run.rungs, config=run.config, order=run.order, secondary=False)
    verdict = next(v for v in judgement.verdicts if v.patch == patch)
    return verdict, tuple(c for c in judgement.comparisons if c.candidate == patch)


def worst_loss(comparisons: Sequence[Comparison]) -> float:
    """Largest loss at a rung."""
    losses = (-c.delta_recall for c in comparisons if c.rung is not None and c.delta_recall is not None)
    return round(max(losses, default=0.0), 9)  # 6 of 60 is a tenth, whatever binary fractions make of it


def arms_wanted(found: Sequence[Attribution]) -> list[tuple[str, str]]:
    """(patch, arm) to serve next: of each attribution that is still open the first arm of the feature it asks for."""
    wanted = []
    for attribution in found:
        if attribution.next_arm is not None:
            suffixes = suffixes_of(attribution.next_arm.feature, "reference")
            if suffixes:
                wanted.append((attribution.patch, suffixes[0]))
    return wanted


def summarise(
    options: ReferenceOptions,
    runs: Sequence[StoredRun],
    verdicts: Mapping[str, tuple[Verdict, tuple[Comparison, ...]]],
    ladder: Sequence[Attribution],
    found: Sequence[Attribution],
    asked: Mapping[str, Sequence[str]],
) -> ReferenceCalibration:
    """The records of a finished calibration."""
    by_patch, at_first = {a.patch: a for a in found}, {a.patch: a for a in ladder}

    def result(fault: ReferenceFault) -> FaultResult:
        verdict, comparisons = verdicts[fault.name]
        attribution = by_patch.get(fault.name)
        families = family_probabilities(attribution.causes) if attribution else {}
        named, first_named = _named(attribution), _named(at_first.get(fault.name))
        best = max(attribution.causes, key=lambda c: c.probability).cause if attribution else None
        return FaultResult(
            name=fault.name,
            title=fault.title,
            family=fault.family,
            loss=tuple(None if c.delta_recall is None else -c.delta_recall for c in comparisons if c.rung is not None),
            verdict=verdict.verdict,
            attributed=named,
            probability=families[named] if named else None,
            cause=best,
            right=named == fault.family if named else None,
            right_from_ladder=first_named == fault.family if first_named else None,
            arms=tuple(asked.get(fault.name, ())),
            served_tokens=sum(_computed_tokens(run.scores, fault.name) for run in runs),
            sentence=attribution.sentence if attribution else verdict.reason,
        )

    made = {fault.name: result(fault) for fault in FAULTS if fault.name in verdicts}
    first = next(iter(verdicts.values()))[1]
    rest = [f for f in made.values() if f.name not in by_patch]
    return ReferenceCalibration(
        rungs=RUNGS,
        conversations=options.conversations,
        seed=options.seed,
        base_recall=tuple(c.recall_baseline for c in first if c.rung is not None),
        drawn=tuple(made[a.patch] for a in found),
        harmless=tuple(f for f in rest if worst_loss(verdicts[f.name][1]) < LEAST_LOSS),
        served_tokens=sum(_computed_tokens(run.scores) for run in runs),
        replies=sum(run.scores.num_rows for run in runs),
    )


def _named(attribution: Attribution | None) -> str | None:
    """The most probable family."""
    if attribution is None:
        return None
    families = family_probabilities(attribution.causes)
    return max(families, key=lambda f: families[f])


def _computed_tokens(scores: pa.Table, patch: str | None = None) -> int:
    """Prompt tokens not taken from a prefix cache: of every build, or of one patch and its arms."""
    names = ("build_id", "context_tokens", "cached_tokens")
    return sum(
        context - (cached or 0)
        for build, context, cached in zip(*(scores[name].to_pylist() for name in names), strict=True)
        if context is not None and (patch is None or build.partition("--")[0] == patch)
    )


def interval(hits: int, n: int) -> tuple[float, float]:
    """Exact binomial 95 % interval."""
    found = stats.binomtest(hits, n).proportion_ci(0.95)
    return float(found.low), float(found.high)


def report_lines(result: ReferenceCalibration) -> list[str]:
    """The outcome as Markdown."""

    def row(f: FaultResult) -> str:
        losses = " / ".join("–" if x is None else f"{-100 * x:+.0f}" for x in f.loss)
        named = "–" if f.attributed is None else f"{f.attributed} ({f.probability:.2f})"
        mark = "–" if f.right is None else "✅" if f.right else "❌"
        arms = ", ".join(f.arms) or "–"
        return (
            f"| `{f.name}` | {f.family} | {losses} | {f.verdict} | {named} {mark} | {f.cause or '–'} | {arms} "
            f"| {f.served_tokens:,} |"
        )

    def share(hits: int) -> str:
        low, high = interval(hits, n) if n else (0.0, 1.0)
        return f"{hits} of {n} [{low:.2f}, {high:.2f}]"

    n = len(result.drawn)
    base = " / ".join("–" if x is None else f"{100 * x:.0f}" for x in result.base_recall)
    rungs = " and ".join(f"{r:,}" for r in result.rungs)
    head = [
        "| fault | is | points at " + rungs + " | verdict | attributed to | by cause | arms asked for | tokens |",
        "|---|---|---|---|---|---|---|--:|",
    ]
    harmed = sum(f.verdict == "culprit" for f in result.harmless)
    lines = [
        f"{n + len(result.harmless)} faults drawn (seed {result.seed}), {n} of them cost recall;"
        f" {result.conversations} conversations, prompts of {rungs} tokens, base recall {base} %.",
        "",
        f"- attributed to the right cause: {share(result.n_right)} (bar: {math.ceil(0.9 * n)})",
        f"- by the two rungs alone: {share(sum(bool(f.right_from_ladder) for f in result.drawn))}",
        f"- exonerated: {share(result.of('exonerated'))} (bar: 0); convicted: {share(result.of('culprit'))}",
        f"- harmless faults convicted: {harmed} of {len(result.harmless)}",
        f"- spent: {result.served_tokens:,} prompt tokens, {result.replies:,} replies",
        "",
        *head,
        *(row(f) for f in result.drawn),
        "",
        f"Faults that cost less than {100 * LEAST_LOSS:.0f} points here, and so have no loss to attribute:",
        "",
        *head,
        *(row(f) for f in result.harmless),
    ]
    return lines
