"""`longrecall eval PATCHSET`: the whole campaign, from sources to verdicts.

    longrecall eval patchsets/reference.toml
    longrecall eval patchsets/reference.toml --rungs 448,1024 --conversations 30 --only noop --fail-on culprit
    longrecall eval patchsets/reference.toml --design factorial --only index-keys-fp8 --only hash-topk-double-scaling
    longrecall eval patchsets/endpoints.toml --model-folder ~/models/served --parallel 2

Killed at any moment, the same command goes on where it was. The last line on standard output is one JSON document;
everything for people goes to standard error. Exit codes: 0 done, 1 culprit found and --fail-on culprit, 2 something
asked for cannot be used, 3 incomplete or controls failed, 4 inconclusive and --fail-on inconclusive.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from longrecall.runners.schema import Arm, PatchSet

FAIL_ON = ("culprit", "inconclusive")
MAX_WAIT_S = 86_400.0


def evaluate(
    patchset: Annotated[Path, typer.Argument(help="Patchset file (TOML).")] = Path("patchsets/reference.toml"),
    rungs: Annotated[str, typer.Option(help="Context lengths in tokens, template included: 448,1K,4K.")] = "448,1536",
    conversations: Annotated[int, typer.Option(min=2, help="Conversations, the unit of evidence.")] = 24,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of conversations and order.")] = 0,
    recipe: Annotated[str, typer.Option(help="Recipe of the conversations: a name or a TOML file.")] = "reference",
    only: Annotated[list[str] | None, typer.Option(help="Run this patch (and the controls); may be repeated.")] = None,
    design: Annotated[
        str | None, typer.Option(help="Serve combinations: screen, oat, oat+loo, factorial or bisect.")
    ] = None,
    parallel: Annotated[int | None, typer.Option(min=1, help="Builds asked at once. Default: one per core.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads per server. Default: cores / parallel.")] = None,
    servers_at_once: Annotated[
        int | None, typer.Option(min=1, help="Builds served at once. Default: by memory.")
    ] = None,
    servers_per_gpu: Annotated[
        int, typer.Option(min=1, help="Builds that share a GPU; bound their memory by a flag.")
    ] = 1,
    fail_on: Annotated[str, typer.Option(help="culprit, inconclusive, or both with a comma.")] = "",
    run_dir: Annotated[Path | None, typer.Option(help="Run folder. Default: new, or the unfinished one.")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("results/runs"),
    fresh: Annotated[bool, typer.Option("--fresh", help="A new run even when an unfinished one is there.")] = False,
    model_folder: Annotated[
        Path | None, typer.Option(help="Model to serve, its tokenizer and template. Default: Gemma 3 270M.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Conversations asked of a build at a time.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Times each question is asked.")] = 1,
    arms: Annotated[
        str, typer.Option(help="warm, cold, branched, free, concat, alone, mirrored; several with commas.")
    ] = "warm",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests of a build open at once.")] = 64,
    gold_logprobs: Annotated[
        bool, typer.Option("--gold-logprobs", help="Ask for the right answer's log-probabilities, too.")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest reply in tokens. Default: enough for the longest answer.")
    ] = None,
    template_args: Annotated[
        str, typer.Option(help='Chat template variables as JSON, such as {"enable_thinking": false}.')
    ] = "{}",
    request_timeout: Annotated[
        float, typer.Option(min=1, max=MAX_WAIT_S, help="Seconds for one whole answer.")
    ] = 300.0,
    start_timeout: Annotated[
        float | None,
        typer.Option(min=1, max=MAX_WAIT_S, help="Seconds for a server's first token. Default: by engine."),
    ] = None,
    inside: Annotated[int, typer.Option(min=0, help="Conversations to look at from inside: selections, KL.")] = 0,
    in_process: Annotated[
        bool | None,
        typer.Option(
            help="Measure the code of patches that lose recall. Default: where the reference model is served."
        ),
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Stream replies; records time to first token.")] = False,
    whole_replies: Annotated[
        bool, typer.Option("--whole-replies", help="Let replies end by themselves, not at their first line.")
    ] = False,
    stop_early: Annotated[
        bool, typer.Option("--stop-early", help="Ask no more of a build once its e-values decide; fewer tokens.")
    ] = False,
    keep_servers: Annotated[bool, typer.Option("--keep-servers", help="Leave the servers up until Ctrl-C.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Nothing on standard error but errors.")] = False,
) -> None:
    """Serve every build of a patchset, replay planted-fact conversations, and say which patch lost recall."""
    from rich.console import Console

    from longrecall.needles.render import parse_template_args
    from longrecall.needles.rungs import parse_rungs
    from longrecall.results.campaign import exit_code, run_campaign
    from longrecall.results.plan import Options
    from longrecall.results.progress import Progress
    from longrecall.results.report import summary_line
    from longrecall.results.report_command import fail, print_summary

    progress = Progress(Console(stderr=True), quiet=quiet)
    try:
        if design is not None:
            patchset, only = write_combinations(patchset, design, only or [], runs_dir, progress.note), None
        options = Options(
            patchset=patchset,
            rungs=parse_rungs(rungs),
            conversations=conversations,
            seed=seed,
            recipe=recipe,
            only=tuple(only or ()),
            parallel=parallel,
            threads=threads,
            servers_at_once=servers_at_once,
            servers_per_gpu=servers_per_gpu,
            runs_dir=runs_dir,
            run_dir=run_dir,
            fresh=fresh,
            model_folder=model_folder,
            block_size=block_size,
            repeats=repeats,
            max_tokens=max_tokens,
            template_args=parse_template_args(template_args),
            arms=parse_arms(arms),
            concurrency=concurrency,
            gold_logprobs=gold_logprobs,
            request_timeout_s=request_timeout,
            start_timeout_s=start_timeout,
            inside=inside,
            in_process=in_process,
            stream=stream,
            stop_early=stop_early,
            whole_replies=whole_replies,
            keep_servers=keep_servers,
        )
        wanted = parse_fail_on(fail_on)
        outcome = run_campaign(options, progress)
    except ValueError as problem:
        raise fail(problem, 2) from None
    except (RuntimeError, OSError) as problem:
        raise fail(_message(problem), 3) from None
    if not quiet:
        print_summary(outcome.report, progress.console)
        if design is not None:
            print_design(outcome.run_dir, progress.console)
        progress.console.print(f"\n{outcome.run_dir}/report.html", soft_wrap=True, highlight=False)
    for build_id, message in outcome.gone.items():
        typer.echo(f"longrecall: error: build {build_id} is incomplete: {message}", err=True)
    code = exit_code(outcome.report, wanted, outcome.gone)
    line = summary_line(outcome.run_dir, outcome.report)
    typer.echo(json.dumps(line, separators=(",", ":")))
    raise typer.Exit(code)


def write_combinations(
    patchset: Path, design: str, only: Sequence[str], runs_dir: Path, note: Callable[[str], None]
) -> Path:
    """The patchset of a design over the suspects, in a folder of its own; patches that conflict are named here."""
    from longrecall.evals.design_patchset import with_suspects, write_design
    from longrecall.evals.designs import DESIGNS
    from longrecall.runners.engines import engine_of
    from longrecall.runners.patchset import load_patchset

    if design not in DESIGNS:
        raise ValueError(f"--design {design}: choose one of {', '.join(DESIGNS)}")
    loaded = load_patchset(patchset)
    engine_of(loaded)
    root = base_root(loaded)
    path = runs_dir / "designs" / f"{patchset.stem}-{design.replace('+', '-')}.toml"
    made = write_design(with_suspects(loaded, only), DESIGNS[design], path, root=root)
    note(f"design {design}: {', '.join(c.build_id for c in made)}")
    return path


def base_root(patchset: "PatchSet") -> Path:
    """The folder that the diffs of an engine with a source of its own apply to."""
    from longrecall.runners.builds import cache_dir
    from longrecall.runners.engines import engine_of

    return engine_of(patchset).base_source(patchset, cache_dir() / "builds").root


def print_design(run_dir: Path, console: "Console") -> None:
    """Who loses alone, only together, or masked; a run too small to be read says so."""
    from longrecall.evals.design_report import read_design

    try:
        for sentence in read_design(run_dir).sentences:
            console.print(f"  {sentence}", soft_wrap=True, highlight=False)
    except ValueError as problem:
        console.print(f"  design: {problem}", soft_wrap=True, highlight=False)


def parse_arms(text: str) -> tuple["Arm", ...]:
    """ "warm,cold" in the order given; raises ValueError naming what is not known."""
    from longrecall.runners.schema import Arm

    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    known = get_args(Arm)
    for word in words:
        if word not in known:
            raise ValueError(f"--arms {text!r}: {word!r} is none of {', '.join(known)}")
    if not words:
        raise ValueError(f"--arms {text!r}: name at least one of {', '.join(known)}")
    return words  # type: ignore[return-value]


def parse_fail_on(text: str) -> frozenset[str]:
    """ "culprit,inconclusive" as a set; raises ValueError naming what is not known."""
    words = frozenset(word.strip() for word in text.split(",") if word.strip())
    for word in words:
        if word not in FAIL_ON:
            raise ValueError(f"--fail-on {text!r}: {word!r} is none of {', '.join(FAIL_ON)}")
    return words


def _message(problem: Exception) -> str:
    if isinstance(problem, OSError) and problem.strerror:
        return f"{problem.filename}: {problem.strerror}" if problem.filename else problem.strerror
    return str(problem)
