"""`longrecall needles`: make, show, lint and count planted-fact conversations.

longrecall needles make --recipe keys --rungs 1024,4096 --count 40 --tokenizer ~/models/m --out sets/demo
longrecall needles make --recipe mine.toml --rungs 4096 --residues 0,1,2,3/4 --server http://127.0.0.1:30000 --out s
longrecall needles show sets/demo --conversation 0 --rung 1024
longrecall needles lint sets/demo --tokenizer ~/models/m       # reference: the model of `make eval`
longrecall needles stats sets/demo
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from longrecall.needles.render import Ruler
    from longrecall.needles.schema import Conversation

app = typer.Typer(help="Make, show, lint and count planted-fact conversations.", no_args_is_help=True)

Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="Model folder with tokenizer.json and a chat template, or a tokenizer.json. Default: reference, the"
        " model of `make eval`."
    ),
]
LintTokenizer = Annotated[
    str | None,
    typer.Option(
        help="Also encode every prompt with this tokenizer, to check lengths: a folder, a tokenizer.json or reference."
    ),
]
Template = Annotated[Path | None, typer.Option(help="Chat template (.jinja) to use instead of the folder's own.")]
TemplateArgs = Annotated[str, typer.Option(help='Template variables as JSON, such as {"enable_thinking": false}.')]
Server = Annotated[str | None, typer.Option(help="Measure on this running server instead of with a tokenizer.")]
Model = Annotated[str | None, typer.Option(help="Model name on --server. Default: the first it lists.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


def _fail(message: str, code: int = 2) -> NoReturn:
    print(f"longrecall: error: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _integers(text: str, option: str) -> list[int]:
    try:
        return [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        _fail(f"{option} {text!r} is not a list of whole numbers such as 0,1,2,3")


def _ruler(
    tokenizer: str | None, template: Path | None, template_args: str, server: str | None, model: str | None
) -> "Ruler":
    from longrecall.needles.render import Ruler, RulerError, parse_template_args

    variables = parse_template_args(template_args)
    if server is not None:
        if given := [name for name, value in (("--tokenizer", tokenizer), ("--template", template)) if value]:
            raise RulerError(f"{' and '.join(given)} cannot be given with --server, which counts with its own")
        from longrecall.needles.server_ruler import ServerRuler

        return ServerRuler(server, model=model, template_args=variables)
    if model is not None:
        raise RulerError(f"--model {model} names a model of --server, which is not given")
    if tokenizer is None or tokenizer == "reference":
        from longrecall.runners.reference.convert import reference_folder

        folder = reference_folder()
    else:
        folder = Path(tokenizer).expanduser()
        if not folder.exists():
            raise RulerError(f"--tokenizer {tokenizer}: there is no such file or folder")
    if template is not None:
        path = folder if folder.suffix == ".json" else folder / "tokenizer.json"
        return Ruler.from_files(path, template, template_args=variables)
    if folder.suffix == ".json":
        folder = folder.parent
    return Ruler.from_folder(folder, template_args=variables)


@app.command()
def make(
    out: Annotated[Path, typer.Option(help="Folder of the set.")],
    recipe: Annotated[str, typer.Option(help="Built-in recipe or a .toml file.")] = "reference",
    rungs: Annotated[str, typer.Option(help="Prompt lengths in tokens, template included: 1K,4K.")] = "1024,4096",
    count: Annotated[int, typer.Option(min=1, help="Conversations.")] = 40,
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.")] = 0,
    residues: Annotated[
        str | None, typer.Option(help="Ask each rung at these remainders: 0,1,2,3/4 (largest such lengths).")
    ] = None,
    concat: Annotated[bool, typer.Option("--concat", help="Write the twin with all turns joined in one, too.")] = False,
    tokenizer: Tokenizer = None,
    template: Template = None,
    template_args: TemplateArgs = "{}",
    server: Server = None,
    model: Model = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a set that is there already.")] = False,
) -> None:
    """Make a set of conversations, lint it, and write it as a Hugging Face data set."""
    from rich.console import Console
    from rich.progress import track

    from longrecall.needles.dataset import write_set
    from longrecall.needles.lint import Linter
    from longrecall.needles.plant import ExactnessError, concat_twin, ladder, make_conversations, make_haystack
    from longrecall.needles.recipes import recipe as named
    from longrecall.needles.rungs import parse_rungs

    try:
        lengths = list(parse_rungs(rungs))
        if residues is not None:
            wanted, _, modulus = residues.partition("/")
            if not modulus.isdigit() or int(modulus) < 1:
                _fail(f"--residues {residues!r} names no modulus; 0,1,2,3/4 is right")
            lengths = ladder(lengths, modulus=int(modulus), residues=_integers(wanted, "--residues"))
        chosen = named(recipe)
        ruler = _ruler(tokenizer, template, template_args, server, model)
        haystack = make_haystack(chosen, ruler, seed)
        linter, twin_linter = Linter(), Linter()

        def linted() -> "Iterator[Conversation]":
            made = make_conversations(chosen, ruler=ruler, rungs=lengths, count=count, seed=seed, haystack=haystack)
            console = Console(stderr=True)
            for conversation in track(made, "Planting", total=count, console=console, disable=not console.is_terminal):
                linter.add(conversation)
                yield conversation

        written = write_set(linted(), out, overwrite=overwrite)
        document = {"folder": str(out), "conversations": written.conversations, "suite_hash": written.suite_hash}
        if concat:
            from longrecall.needles.dataset import iter_parquet

            twins = (concat_twin(conversation, haystack) for conversation in iter_parquet(written.path))
            twin = write_set(_added(twins, twin_linter), out / "concat", overwrite=overwrite)
            document |= {"concat_folder": str(out / "concat"), "concat_suite_hash": twin.suite_hash}
    except ExactnessError as error:
        _fail(str(error), 3)
    except (ValueError, OSError) as error:
        _fail(str(error))
    problems = [*linter.problems(), *twin_linter.problems()]
    for problem in problems[:20]:
        print(f"{problem.rule}: {problem.conversation_id or 'set'}: {problem.message}", file=sys.stderr)
    print(json.dumps({**document, "problems": len(problems)}))
    if problems:
        raise typer.Exit(3)


def _added(conversations: "Iterator[Conversation]", linter: object) -> "Iterator[Conversation]":
    for conversation in conversations:
        linter.add(conversation)  # type: ignore[attr-defined]
        yield conversation


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="Folder or Parquet file of a set.")],
    conversation: Annotated[int, typer.Option(help="Number of the conversation.")] = 0,
    rung: Annotated[int | None, typer.Option(help="Show the prompts of this rung. Default: the first.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Print fillers whole instead of their beginning.")] = False,
) -> None:
    """Print a conversation with its facts marked ("[fact: …]" where there is no colour), and the prompts that ask."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from longrecall.needles.dataset import iter_parquet, set_file

    try:
        found = next((c for place, c in enumerate(iter_parquet(set_file(path))) if place == conversation), None)
    except (ValueError, OSError) as error:
        _fail(str(error))
    if found is None:
        _fail(f"{path} has no conversation number {conversation}")
    chosen = rung if rung is not None else next(iter(found.rungs), None)
    if chosen not in found.rungs:
        _fail(f"{found.conversation_id} has no rung {chosen}; its rungs are {', '.join(map(str, found.rungs))}")
    console = Console()
    coloured = console.color_system is not None and not console.no_color
    asks = [ask for ask in found.asks if ask.rung == chosen]
    end = max((ask.turn_end for ask in asks), default=len(found.turns))
    console.print(f"[bold]{found.conversation_id}[/] rung {chosen}, history of {end} turns", highlight=False)
    for turn in found.turns[:end]:
        text = turn.content if full or turn.fact_ids or len(turn.content) < 100 else f"{turn.content[:97]}…"
        style = "bold yellow" if turn.fact_ids else "dim"
        text = f"[fact: {text}]" if turn.fact_ids and not coloured else text
        console.print(Text(f"{turn.turn_index:>4} {turn.role:<9} ").append(text, style))
    table = Table("probe", "kind", "question", "gold", "depth %", "distance", box=None)
    probes = {probe.probe_id: probe for probe in found.probes}
    if lost := [ask.probe_id for ask in asks if ask.probe_id not in probes]:
        _fail(
            f"{path}: {found.conversation_id} asks {lost[0]}, which does not exist; `longrecall needles lint` says more"
        )
    for ask in asks:
        probe = probes[ask.probe_id]
        gold = probe.gold if len(probe.gold) < 40 else f"{probe.gold[:37]}…"
        table.add_row(
            probe.probe_id.rsplit("/", 1)[-1],
            probe.kind,
            escape(ask.tail[0].content if not found.turns else " / ".join(turn.content for turn in ask.tail)),
            escape(gold) or "(none)",
            "" if ask.depth_pct is None else f"{ask.depth_pct:.1f}",
            "" if ask.distance_tokens is None else str(ask.distance_tokens),
        )
    console.print(table)


@app.command()
def lint(
    path: Annotated[Path, typer.Argument(help="Folder or Parquet file of a set.")],
    tokenizer: LintTokenizer = None,
    template: Template = None,
    template_args: TemplateArgs = "{}",
    server: Server = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Prove that every answer is true and stands only where planted; with a tokenizer, that lengths are exact."""
    from longrecall.needles.dataset import iter_parquet, set_file, stored_hash, suite_hash
    from longrecall.needles.lint import Linter

    if not tokenizer and not server and (template or model or template_args != "{}"):
        _fail("--template, --template-args and --model say how to check lengths: give --tokenizer or --server too")
    try:
        ruler = _ruler(tokenizer, template, template_args, server, model) if tokenizer or server else None
        linter = Linter(ruler)
        file = set_file(path)
        number = 0
        for conversation in iter_parquet(file):
            linter.add(conversation)
            number += 1
        stored = stored_hash(file)
        changed = stored is not None and suite_hash(iter_parquet(file)) != stored
    except (ValueError, OSError) as error:
        _fail(str(error))
    problems = linter.problems()
    lines = [f"{p.rule}: {p.probe_id or p.conversation_id or 'set'}: {p.message}" for p in problems]
    if changed:
        lines.append(f"content-hash: set: the content is not what was written (stored hash {stored})")
    if as_json:
        print(json.dumps({"conversations": number, "problems": lines, "lengths_checked": ruler is not None}))
    else:
        for line in lines[:50]:
            print(line)
        unchecked = "lengths not checked: give --tokenizer reference, a folder or a tokenizer.json, or --server"
        checked = "lengths checked" if ruler is not None else unchecked
        print(f"{number} conversations, {len(lines)} problems ({checked})")
    if lines:
        raise typer.Exit(3)


@app.command()
def stats(
    path: Annotated[Path, typer.Argument(help="Folder or Parquet file of a set.")],
    as_json: AsJson = False,
) -> None:
    """Count what a set holds: prompts by kind and rung, depths, distances, and what constant answers would score."""
    from longrecall.needles.dataset import iter_parquet, set_file
    from longrecall.needles.stats import count

    try:
        counted = count(iter_parquet(set_file(path)))
    except (ValueError, OSError) as error:
        _fail(str(error))
    if as_json:
        print(json.dumps(counted.as_json()))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    head = f"{counted.conversations} conversations, {counted.facts} facts, {counted.turns} turns"
    console.print(f"{head}, suite {counted.suite_hash[:12]}", highlight=False)
    table = Table("kind", "rung", "prompts", "depth % (mean)", "distance tokens (median)", box=None)
    for cell in counted.cells:
        table.add_row(
            cell.kind,
            str(cell.rung),
            str(cell.prompts),
            "" if cell.mean_depth_pct is None else f"{cell.mean_depth_pct:.1f}",
            "" if cell.median_distance_tokens is None else str(cell.median_distance_tokens),
        )
    console.print(table)
    for name, share in counted.baselines.items():
        console.print(f'answering "{name}" would be right on {share:.1%}', highlight=False)
