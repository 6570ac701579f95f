"""Commands of the analysis; all work offline on stored runs or on none.

longrecall compare results/runs/A:base results/runs/B:base
longrecall plan --margin 0.05 --rungs 2048,8192,32768 --from-run results/runs/A
longrecall calibrate --reps 2000
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from longrecall.evals.schema import Attribution
    from longrecall.results.calibrate_reference import ReferenceOptions


def _fail(error: Exception) -> NoReturn:
    typer.echo(f"longrecall: error: {error}", err=True)
    raise typer.Exit(2)


def compare(
    baseline: Annotated[str, typer.Argument(help="RUN or RUN:BUILD; the build is the run's base when not named.")],
    candidate: Annotated[str, typer.Argument(help="RUN or RUN:BUILD.")],
    margin: Annotated[float | None, typer.Option(help="Largest loss that counts as none; the baseline run's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same numbers as one JSON document.")] = False,
    fail_on_loss: Annotated[bool, typer.Option("--fail-on-loss", help="Exit 1 when a loss is shown.")] = False,
) -> None:
    """Compare two builds of stored runs, conversation by conversation.

    longrecall compare results/runs/monday results/runs/tuesday:index-keys-fp8

    Both runs must have asked the same suite. A comparison across runs has no controls of its own, so it ends in
    "loss shown", "loss excluded" or "cannot tell", never in a verdict.
    """
    from longrecall.evals.across import compare_runs
    from longrecall.evals.scores_file import ScoresError

    try:
        result = compare_runs(baseline, candidate, margin=margin)
    except ScoresError as error:
        _fail(error)
    if as_json:
        typer.echo(json.dumps(asdict(result), separators=(",", ":"), allow_nan=False))
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{result.candidate} against {result.baseline}")
        for name in ("rung", "conversations", "pairs", "unscored", "baseline", "candidate", "change", "95 % interval"):
            table.add_column(name, justify="right")
        table.add_column("p (loss)", justify="right")
        table.add_column("lost / gained", justify="right")
        for c in result.comparisons:
            table.add_row(
                str(c.rung) if c.rung is not None else "all",
                str(c.n_conversations),
                str(c.n_probes),
                str(c.n_missing),
                _share(c.recall_baseline),
                _share(c.recall_candidate),
                _points(c.delta_recall),
                f"{_points(c.ci_low)} to {_points(c.ci_high)}",
                "–" if c.p_loss is None else f"{c.p_loss:.2g}",
                f"{c.lost} / {c.gained}",
            )
        Console(width=None if sys.stdout.isatty() else 130).print(table)
        for note in result.notes:
            typer.echo(note)
        typer.echo(f"{result.result}: {result.reason}")
    if fail_on_loss and result.result == "loss shown":
        raise typer.Exit(1)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _points(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:+.1f}"


def plan(
    rungs: Annotated[str, typer.Option(help="Context lengths in tokens: 448,1K,2K.")] = "448,1024,2048",
    margin: Annotated[float, typer.Option(help="Largest loss of recall that counts as none.")] = 0.10,
    loss: Annotated[float, typer.Option(help="Loss that a conviction should see.")] = 0.10,
    patches: Annotated[int, typer.Option(min=1, help="Patches under suspicion.")] = 6,
    probes: Annotated[int, typer.Option(min=1, help="Probes per conversation.")] = 8,
    from_run: Annotated[Path | None, typer.Option(help="Take flips and spread from this run's A/A build.")] = None,
    flips: Annotated[float, typer.Option(help="Share of replies that differ between two runs of one build.")] = 0.03,
    rho: Annotated[float, typer.Option(help="Correlation of those differences within a conversation.")] = 0.05,
    tail_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a probe's branch and its answer.")] = 64,
    tokens_per_second: Annotated[float | None, typer.Option(help="Measured prefill speed, for GPU time.")] = None,
    alpha: Annotated[float, typer.Option(help="Error rate of each kind.")] = 0.05,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Turn a margin and A/A measurements into conversations, served tokens and time.

    longrecall plan --margin 0.05 --patches 4 --from-run results/runs/A --tokens-per-second 9000
    """
    from longrecall.evals.planning import make_plan
    from longrecall.evals.scores_file import ScoresError
    from longrecall.needles.rungs import parse_rungs

    try:
        made = make_plan(
            rungs=parse_rungs(rungs) if from_run is None else None,
            margin=margin,
            loss=loss,
            n_patches=patches,
            n_probes=probes,
            from_run=from_run,
            flips=flips,
            rho=rho,
            tail_tokens=tail_tokens,
            tokens_per_second=tokens_per_second,
            alpha=alpha,
        )
    except (ScoresError, ValueError) as error:
        _fail(error)
    if as_json:
        typer.echo(json.dumps(asdict(made), separators=(",", ":"), allow_nan=False))
        return
    typer.echo(f"noise: {made.source}")
    for cell in made.cells:
        typer.echo(
            f"  {cell.rung:>8} tokens: {cell.to_exonerate} conversations exonerate within {100 * margin:.0f} points, "
            f"{cell.to_convict} convict a loss of {100 * loss:.0f} points "
            f"(flips {cell.flips:.1%}, sd {cell.spread:.3f})"
        )
    typer.echo(
        f"ask {made.n_conversations} conversations × {made.n_probes} probes × {len(made.cells)} rungs "
        f"of {made.n_builds} builds (base, base again, positive control, no-op, {patches} patches)"
    )
    typer.echo(
        f"served tokens: {made.tokens_warm:,} with the prefix cache, {made.tokens_cold:,} without"
        + (
            f"; {made.seconds_warm:,.0f} s at {tokens_per_second:,.0f} tokens/s"
            if made.seconds_warm is not None
            else ""
        )
    )


def attribute(
    run: Annotated[list[Path], typer.Argument(help="Run folder; later ones add arms served afterwards.")],
    patch: Annotated[str | None, typer.Option(help="One patch; all that lose recall when left out.")] = None,
    evidence: Annotated[list[Path] | None, typer.Option(help="In-process observations (JSON); repeatable.")] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Measure the patches' own code first (reference build).")
    ] = False,
    serve_next: Annotated[bool, typer.Option("--next", help="Measure or serve the next arm now.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --next: write its patchset only.")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say why a patch loses recall: which causes fit, which are ruled out, what to measure next.

    longrecall attribute results/runs/A
    longrecall attribute results/runs/A --patch index-rotation-one-sided --next
    longrecall attribute results/runs/A results/runs/B --evidence needle_hits.json
    """
    from longrecall.evals.explain import attribute_runs
    from longrecall.evals.scores_file import ScoresError

    try:
        found = attribute_runs(run, patch=patch, evidence=evidence or [])
        if in_process:
            _gather(run[0], [a.patch for a in found])
            found = attribute_runs(run, patch=patch, evidence=evidence or [])
    except ScoresError as error:
        _fail(error)
    if as_json:
        typer.echo(json.dumps([asdict(a) for a in found], separators=(",", ":"), allow_nan=False))
    else:
        for attribution in found:
            _print_causes(attribution)
        if not found:
            typer.echo(
                "no patch loses recall in this run: nothing to attribute (name one with --patch to see it anyway)"
            )
    if serve_next:
        _serve_next(run, found, dry_run=dry_run, evidence=evidence or [])


def _print_causes(found: "Attribution") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=found.patch)
    for name in ("cause", "family", "probability", "predicted", "ruled out by"):
        table.add_column(name)
    for fit in found.causes:
        predicted = ", ".join(f"{k} {v}" for k, v in fit.predicted.items() if v != "any")
        family = f"{fit.family} ({found.families[fit.family]:.2f})"
        table.add_row(fit.cause, family, f"{fit.probability:.2f}", predicted, ", ".join(fit.contradicted_by) or "–")
    Console(width=None if sys.stdout.isatty() else 170).print(table)
    for o in found.observations:
        typer.echo(f"  {o.feature}: {o.estimate:+.2f} ± {1.96 * o.stderr:.2f} ({o.source}, n = {o.n}) {o.detail}")
    typer.echo(found.sentence)


def _serve_next(runs: list[Path], found: "Sequence[Attribution]", *, dry_run: bool, evidence: list[Path]) -> None:
    """Write the patchset of the first open attribution's next arm, serve it as a campaign, and attribute again."""
    import subprocess

    from longrecall.evals.causes import IN_PROCESS
    from longrecall.evals.next_arm import write_next_patchset
    from longrecall.evals.scores_file import ScoresError

    wanted = next((a for a in found if a.next_arm is not None), None)
    if wanted is None or wanted.next_arm is None:
        typer.echo("nothing is left to separate: no further arm")
        return
    typer.echo(f"next arm: {wanted.next_arm.question}")
    if wanted.next_arm.feature in IN_PROCESS:
        if not dry_run:
            _gather(runs[0], [wanted.patch])
            _attribute_again(runs, wanted.patch, evidence)
        return
    path = runs[0] / f"next-{wanted.patch}-{wanted.next_arm.feature}.toml"
    try:
        write_next_patchset(runs[0], wanted.patch, wanted.next_arm, path)
        command = [
            "-m",
            "longrecall.results.main",
            "eval",
            str(path),
            *_same_questions(runs[0], wanted.next_arm.feature),
        ]
    except ScoresError as error:
        _fail(error)
    typer.echo(f"longrecall {shlex.join(command[2:])}")
    if dry_run:
        return
    done = subprocess.run([sys.executable, *command], check=False, stdout=subprocess.PIPE, text=True)
    try:
        served = Path(json.loads(done.stdout.strip().splitlines()[-1])["run_dir"])
    except (IndexError, KeyError, ValueError):
        raise typer.Exit(done.returncode or 3) from None
    _attribute_again([*runs, served], wanted.patch, evidence)


def _attribute_again(runs: list[Path], patch: str, evidence: list[Path]) -> None:
    """Print what is known now, and the command that goes on."""
    from longrecall.evals.explain import attribute_runs
    from longrecall.evals.scores_file import ScoresError

    try:
        for attribution in attribute_runs(runs, patch=patch, evidence=evidence):
            _print_causes(attribution)
    except ScoresError as error:
        _fail(error)
    typer.echo(f"longrecall attribute {' '.join(map(str, runs))} --patch {patch} --next")


def _gather(run: Path, patches: "Sequence[str]") -> None:
    """Measure patches in-process; the files stay in the run folder, where attribution and report find them."""
    from longrecall.results.in_process import gather_evidence

    try:
        gather_evidence(run, patches, lambda text: typer.echo(text, err=True))
    except (ValueError, RuntimeError) as error:
        _fail(error)


ARM_CONVERSATIONS = 8
"""Conversations of an arm: equal replies are seen on a handful, and the loss itself is known already."""


def _same_questions(run: Path, feature: str) -> list[str]:
    """Arguments of `eval` that ask the run's own questions again (of fewer conversations, where the run has many)."""
    from longrecall.evals.next_arm import next_client_arms, next_rungs
    from longrecall.evals.scores_file import ScoresError
    from longrecall.evals.stored_run import load_run

    stored = load_run(run)
    try:
        campaign = json.loads((run / "campaign.json").read_bytes())
        recipe, seed, folder = campaign["recipe"], campaign["seed"], run.parent
    except (OSError, ValueError, KeyError) as error:
        raise ScoresError(f"{run / 'campaign.json'}: {error} is missing") from None
    return [
        "--rungs", ",".join(map(str, next_rungs(feature, stored.rungs))),
        "--conversations", str(min(len(stored.order), ARM_CONVERSATIONS)),
        "--recipe", str(recipe), "--seed", str(seed), "--runs-dir", str(folder),
        "--arms", ",".join(next_client_arms(feature)),
        *(["--model-folder", folder_of_model] if (folder_of_model := campaign.get("model_folder")) else []),
        *(["--template-args", json.dumps(variables)] if (variables := campaign.get("template_args")) else []),
    ]  # fmt: skip


design_app = typer.Typer(
    help="Serve combinations of patches, and read who loses alone, only together, or masked.", no_args_is_help=True
)


@design_app.command("make")
def design_make(
    patchset: Annotated[Path, typer.Argument(help="Patchset file (TOML).")],
    design: Annotated[str, typer.Option(help="screen, oat, oat+loo, factorial or bisect.")] = "oat+loo",
    only: Annotated[list[str] | None, typer.Option(help="These suspects only; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Patchset to write. Default: beside the first.")] = None,
    source: Annotated[Path | None, typer.Option(help="Folder the diffs apply to. Default: this checkout.")] = None,
) -> None:
    """Write the patchset of a design; conflicting patches are named here, before any server starts.

    longrecall design make patchsets/reference.toml --design factorial --only index-keys-fp8 --only mhc-bf16
    """
    from longrecall.evals.design_patchset import with_suspects, write_design
    from longrecall.evals.designs import DESIGNS, DesignError
    from longrecall.runners.diffs import DiffError
    from longrecall.runners.patchset import PatchsetError, load_patchset

    try:
        if design not in DESIGNS:
            raise DesignError(f"--design {design}: choose one of {', '.join(DESIGNS)}")
        loaded = with_suspects(load_patchset(patchset), only or ())
        target = out or patchset.with_name(f"{patchset.stem}-{design.replace('+', '-')}.toml")
        root = source or Path(__file__).resolve().parent.parent
        made = write_design(loaded, DESIGNS[design], target, root=root)
    except (DesignError, DiffError, PatchsetError) as error:
        _fail(error)
    for combination in made:
        typer.echo(f"  {combination.build_id}: {' + '.join(combination.patch_ids) or 'nothing'}")
    typer.echo(f"{len(made)} builds; longrecall eval {target}")


@design_app.command("read")
def design_read(
    run: Annotated[Path, typer.Argument(help="Run folder of a design's campaign.")],
    rung: Annotated[int | None, typer.Option(help="Read one rung; all together when left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say what each patch does alone and in company, which pairs interact, and how a joint loss divides.

    longrecall design read results/runs/A
    """
    from longrecall.evals.design_report import read_design
    from longrecall.evals.designs import DesignError
    from longrecall.evals.scores_file import ScoresError

    try:
        found = read_design(run, rung=rung)
    except (ScoresError, DesignError) as error:
        _fail(error)
    if as_json:
        typer.echo(json.dumps(asdict(found), separators=(",", ":"), allow_nan=False))
        return
    for sentence in found.sentences:
        typer.echo(sentence)


def calibrate(
    reps: Annotated[int, typer.Option(min=20, help="Simulated campaigns per setting.")] = 1000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    only: Annotated[list[str] | None, typer.Option(help="type1, exonerate, power, campaign, attribution.")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    reference: Annotated[bool, typer.Option("--reference", help="Serve known faults instead of simulating.")] = False,
    faults: Annotated[int, typer.Option(min=1, help="With --reference: faults drawn from the catalogue.")] = 26,
    conversations: Annotated[int, typer.Option(min=4, help="With --reference: conversations per fault.")] = 12,
    folder: Annotated[Path, typer.Option(help="With --reference: where it is kept, and goes on.")] = Path(
        "results/runs/calibration-reference"
    ),
    servers_at_once: Annotated[int | None, typer.Option(min=1, help="With --reference: builds up at a time.")] = None,
    unseen: Annotated[
        Path | None, typer.Option(help="With --reference: leave out what the calibration in this folder drew.")
    ] = None,
) -> None:
    """Measure the error rates of the verdicts by simulation, beside those of tests that are not used and why.

    longrecall calibrate --reps 200 --only type1 --only exonerate
    longrecall calibrate --reference --faults 26

    With --reference known faults are put into the reference build as real diffs, served, judged and attributed.

    Exits 3 when a rate is above its bar by more than its own sampling error.
    """
    from longrecall.evals.calibration import TABLES, run_calibration

    if reference:
        from longrecall.results.calibrate_reference import ReferenceOptions

        options = ReferenceOptions(
            folder=folder,
            faults=faults,
            seed=seed,
            unseen=unseen,
            conversations=conversations,
            servers_at_once=servers_at_once,
        )
        _calibrate_reference(options, as_json=as_json)
        return
    wanted = list(only) if only else list(TABLES)
    unknown = sorted(set(wanted) - set(TABLES))
    if unknown:
        _fail(ValueError(f"--only {unknown[0]}: known tables are {', '.join(TABLES)}"))
    rows = run_calibration(reps=reps, seed=seed, only=wanted)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], separators=(",", ":"), allow_nan=False))
    else:
        _print_rows([asdict(row) for row in rows])
    if any(row.verdict == "above the bar" for row in rows):
        raise typer.Exit(3)


def _calibrate_reference(options: "ReferenceOptions", *, as_json: bool) -> None:
    from rich.console import Console

    from longrecall.results.calibrate_reference import calibrate_reference, report_lines
    from longrecall.results.progress import Progress

    try:
        result = calibrate_reference(options, Progress(Console(stderr=True), quiet=False))
    except ValueError as error:
        _fail(error)
    except (RuntimeError, OSError) as error:
        typer.echo(f"longrecall: error: {error}", err=True)
        raise typer.Exit(3) from None
    if as_json:
        typer.echo(json.dumps(asdict(result), separators=(",", ":"), allow_nan=False))
    else:
        typer.echo("\n".join(report_lines(result)))
    if not result.within_bars():
        raise typer.Exit(3)


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("table", "setting", "rule", "measured", "95 % interval", "bar", "verdict"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            row["table"],
            row["setting"],
            row["rule"],
            f"{row['value']:.4g}",
            f"{row['low']:.3g} – {row['high']:.3g}" if row["low"] is not None else "–",
            row["bar"] or "–",
            row["verdict"] or "–",
        )
    Console(width=None if sys.stdout.isatty() else 170).print(table)
