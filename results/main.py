"""The command line: `longrecall COMMAND …`, one module per command, imported only when it is asked for.

    longrecall eval patchsets/reference.toml
    longrecall needles make --rungs 1024,4096 --count 40 --out sets/demo
    longrecall bench indexer

Each entry of `COMMANDS` names a module and a Typer app or function in it. Start-up stays fast because
torch, datasets and the kernels are imported by the command that needs them, never here.
"""

import importlib
import sys
from typing import Annotated, NamedTuple

import typer


class Command(NamedTuple):
    """Where a command lives."""

    target: str
    """module:attribute; the attribute is a `typer.Typer` or a function with Typer annotations."""
    help: str


COMMANDS: dict[str, Command] = {
    "eval": Command("longrecall.results.eval_command:evaluate", "Run a campaign: builds, replays, verdicts, report."),
    "needles": Command("longrecall.needles.cli:app", "Make, show, lint and count planted-fact conversations."),
    "serve": Command("longrecall.runners.cli:serve", "Serve one reference build over HTTP."),
    "builds": Command("longrecall.runners.cli:builds", "Show the builds of a patchset without starting them."),
    "compare": Command("longrecall.evals.cli:compare", "Compare two builds of stored runs."),
    "plan": Command("longrecall.evals.cli:plan", "Turn a margin and A/A measurements into sizes."),
    "attribute": Command("longrecall.evals.cli:attribute", "Say why a patch loses recall and what to measure next."),
    "design": Command("longrecall.evals.cli:design_app", "Serve combinations of patches and read their interactions."),
    "calibrate": Command("longrecall.evals.cli:calibrate", "Measure the error rates of the verdicts by simulation."),
    "report": Command("longrecall.results.report_command:report", "Write the reports of a stored run again."),
    "history": Command("longrecall.results.history_command:app", "Keep and read the run history."),
    "trend": Command("longrecall.results.trend_command:trend", "Recall against length over commits."),
    "serve-report": Command("longrecall.results.serve_report:serve_report", "Reports and trend as a local site."),
    "gate": Command("longrecall.results.gate_command:gate", "CI gate: exit code, JUnit, Markdown."),
    "indexer": Command("longrecall.kernels.indexer.cli:app", "What key formats and faults do to the DSA selection."),
    "trace": Command("longrecall.results.trace_command:app", "Read from source who applies the routed scaling factor."),
}

BENCHES: dict[str, Command] = {
    "needles": Command("longrecall.needles.bench:bench", "Generation speed."),
    "indexer": Command("longrecall.kernels.indexer.bench:bench", "Index score and top-k."),
    "moe": Command("longrecall.kernels.moe.bench:bench", "Mixture of experts."),
    "verdict": Command("longrecall.evals.bench:bench", "Verdicts on a large campaign."),
    "history": Command("longrecall.results.bench:bench", "Run store."),
    "client": Command("longrecall.runners.bench:bench", "Processor time of the replay client per request."),
    "reference": Command("longrecall.runners.reference.bench:bench", "Prefill and decode of the reference build."),
}


def _attach(app: typer.Typer, name: str, command: Command) -> None:
    module_name, attribute = command.target.split(":")
    target = getattr(importlib.import_module(module_name), attribute)
    if isinstance(target, typer.Typer):
        app.add_typer(target, name=name, help=command.help)
    else:
        app.command(name=name, help=target.__doc__ or command.help)(target)


def _placeholder(app: typer.Typer, name: str, command: Command) -> None:
    app.command(name=name, help=command.help)(lambda: None)


def _say_version(asked: bool) -> None:
    if asked:
        from longrecall.results.report import version

        typer.echo(f"longrecall {version()}")
        raise typer.Exit


def _version_option(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Find the serving patch that made a model forget: planted facts, one-patch builds, verdicts, attribution."""


def build_app(argv: list[str]) -> typer.Typer:
    """The app with every command named and only the one in `argv` imported."""
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_version_option)
    bench = typer.Typer(help="Benchmarks; the last line on standard output is one JSON document.", no_args_is_help=True)
    wanted = argv[0] if argv else ""
    wanted_bench = argv[1] if wanted == "bench" and len(argv) > 1 else ""
    for name, command in COMMANDS.items():
        (_attach if name == wanted else _placeholder)(app, name, command)
    for name, command in BENCHES.items():
        (_attach if name == wanted_bench else _placeholder)(bench, name, command)
    app.add_typer(bench, name="bench")
    return app


def run() -> None:
    """Entry point of the `longrecall` script."""
    build_app(sys.argv[1:])(prog_name="longrecall")


if __name__ == "__main__":
    run()
