"""`longrecall indexer`: what key formats and faults do to the DSA selection.

longrecall indexer sweep --preset v4-flash --lengths 1K..1M --formats bf16,fp8,fp4
longrecall indexer sweep --preset v4-flash --lengths 4K,16K --faults all --plot sweep.svg --json sweep.json
longrecall indexer faults
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from longrecall.kernels.indexer.sweep import Row

app = typer.Typer(help="What key formats and faults do to the DSA selection.", no_args_is_help=True)

PLOTTED = {
    "set_recall": "set recall",
    "needle_hit": "needle hit",
    "needle_margin_sigma": "needle margin (sigma of the format's noise)",
}


class UsageError(ValueError):
    """An option that cannot be read."""


@contextmanager
def refusing() -> Iterator[None]:
    """What is wrong with an option or a file is said in one line, with exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"longrecall: error: {error}", err=True)
        raise typer.Exit(2) from error


def parse_lengths(text: str) -> list[int]:
    """ "1K..1M" (doubling), "4K,16K" or "2052" to token counts; K and M are powers of 1024."""

    def number(part: str) -> int:
        match = re.fullmatch(r"(\d+)([KkMm]?)", part.strip())
        if not match or int(match[1]) < 1:
            raise UsageError(f"length {part!r} is not a token count such as 2052, 16K or 1M")
        return int(match[1]) * {"": 1, "K": 1024, "M": 1024**2}[match[2].upper()]

    lengths: list[int] = []
    for part in text.split(","):
        if ".." in part:
            low, high = (number(end) for end in part.split("..", 1))
            if low > high:
                raise UsageError(f"lengths {part!r} run backwards")
            while low <= high:
                lengths.append(low)
                low *= 2
        else:
            lengths.append(number(part))
    return sorted(set(lengths))


def write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(temporary, "wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)


def plot(rows: "list[Row]", path: Path) -> None:
    """Measures against length, a line per arm; the suffix chooses .svg, .png or .json (Vega-Lite)."""
    import io

    import altair as alt

    if path.suffix not in (".svg", ".png", ".json"):
        raise UsageError(f"plot {path} must end in .svg, .png or .json")
    charts = []
    for measure, title in PLOTTED.items():
        values = [
            {"tokens": row.tokens, "arm": row.arm, "value": getattr(row, measure)}
            for row in rows
            if getattr(row, measure) is not None
        ]
        if not values:
            continue
        charts.append(
            alt.Chart(alt.Data(values=values), width=360, height=260)
            .mark_line(point=True)
            .encode(
                x=alt.X("tokens:Q", scale=alt.Scale(type="log", base=2), title="context tokens"),
                # margins of bf16 and fp4 lie two orders of magnitude apart, and lost needles below zero
                y=alt.Y("value:Q", title=title, scale=alt.Scale(type="symlog" if "margin" in measure else "linear")),
                color=alt.Color("arm:N", sort=None, title="keys"),
                tooltip=["arm:N", "tokens:Q", alt.Tooltip("value:Q", format=".3f")],
            )
        )
    chart = alt.hconcat(*charts).properties(title=f"Index key formats, {rows[0].source} activations")
    buffer = io.BytesIO()
    if path.suffix == ".json":
        buffer.write(chart.to_json().encode())
    elif path.suffix == ".svg":
        text = io.StringIO()
        chart.save(text, format="svg")
        buffer.write(text.getvalue().encode())
    else:
        chart.save(buffer, format="png", ppi=144)
    write_atomically(path, buffer.getvalue())


def _table(rows: "list[Row]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Selection against the exact fp32 one, means over queries")
    for name in ("tokens", "candidates", "layer", "keys", "set recall", "needle hit", "needle rank", "margin/σ",
                 "mass recall", "critical tokens"):  # fmt: skip
        table.add_column(name, justify="left" if name == "keys" else "right", no_wrap=name == "keys")

    def cell(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    previous = None
    for row in rows:
        if previous not in (None, (row.tokens, row.layer, row.source)):
            table.add_section()
        previous = (row.tokens, row.layer, row.source)
        table.add_row(
            f"{row.tokens:,}", f"{row.candidates:,}", cell(row.layer, "d"), row.arm, f"{row.set_recall:.3f}",
            cell(row.needle_hit, ".2f"), cell(row.needle_rank, ",.0f"), cell(row.needle_margin_sigma, ".1f"),
            cell(row.mass_recall, ".3f"), cell(row.critical_tokens, ",d"),
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 130).print(table)


@app.command()
@refusing()
def sweep(
    preset: Annotated[str, typer.Option(help="v3.2, glm-5, v4-flash, v4-pro or reference.")] = "v4-flash",
    lengths: Annotated[str, typer.Option(help="Context tokens: 1K..1M doubles, 4K,16K lists.")] = "1K..64K",
    formats: Annotated[str, typer.Option(help="Key formats, comma-separated, or all.")] = "bf16,fp8,fp8_ue8m0,fp4",
    faults: Annotated[
        str, typer.Option(help="Faults to measure beside the formats, comma-separated, or all.")
    ] = "none",
    capture: Annotated[list[Path] | None, typer.Option(help="Capture files instead of synthetic activations.")] = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries per length.")] = 8,
    needle_sigma: Annotated[float, typer.Option(help="Needle's score above the background, in its sigmas.")] = 4.0,
    outlier_channels: Annotated[int, typer.Option(min=0, max=128, help="Key channels 20 times as large.")] = 0,
    seed: Annotated[int, typer.Option(help="Same seed, same rows.")] = 0,
    plot_to: Annotated[Path | None, typer.Option("--plot", help=".svg, .png or .json (Vega-Lite).")] = None,
    json_to: Annotated[Path | None, typer.Option("--json", help="Write the rows as JSON.")] = None,
) -> None:
    """Print and plot the measures of each key format, and of each fault that --faults names, by context length."""
    from longrecall.kernels.faults import catalogue, fault
    from longrecall.kernels.indexer import presets
    from longrecall.kernels.indexer.formats import FORMATS, check_format
    from longrecall.kernels.indexer.sweep import arms_of, rows_as_dicts, sweep_captures, sweep_synthetic

    chosen = presets.preset(preset)
    names = [name for name in FORMATS if name != "fp8_fnuz"] if formats == "all" else formats.split(",")
    for name in names:
        check_format(name)
    if faults == "all":
        wanted = list(catalogue("indexer"))
    else:
        wanted = [] if faults == "none" else [fault(name) for name in faults.split(",")]
    arms = arms_of(names, wanted, chosen.served_format)
    if capture:
        rows = list(sweep_captures(capture, arms))
    else:
        counts = parse_lengths(lengths)
        if chosen.candidates(counts[0]) < 2 * queries:
            raise UsageError(
                f"{counts[0]} tokens hold {chosen.candidates(counts[0])} keys, too few for {queries} needles"
            )
        rows = list(
            sweep_synthetic(
                chosen, counts, arms, seed=seed, queries=queries, needle_sigma=needle_sigma,
                outlier_channels=outlier_channels,
            )
        )  # fmt: skip
    _table(rows)
    if not capture:
        typer.echo(f"{chosen.name}: every key is selected up to {chosen.identity_tokens:,} tokens.")
    if json_to:
        write_atomically(
            json_to, json.dumps({"schema_version": 1, "preset": preset, "rows": rows_as_dicts(rows)}).encode()
        )
    if plot_to:
        plot(rows, plot_to)


@app.command(name="faults")
def list_faults(part: Annotated[str | None, typer.Option(help="indexer, moe, mhc, sparse_attention.")] = None) -> None:
    """List the fault catalogue with predicted signatures."""
    from rich.console import Console
    from rich.table import Table

    from longrecall.kernels.faults import catalogue

    table = Table()
    for name in ("fault", "acts below onset", "selection", "grows", "phases", "residue", "sources"):
        table.add_column(name)
    for entry in catalogue(part):
        s = entry.signature
        residue = f"{s.residue.values} mod {s.residue.modulus}" if s.residue else "–"
        table.add_row(entry.name, "yes" if s.below_onset else "no", s.selection, "yes" if s.grows_with_length else "no",
                      "+".join(s.phases), residue, " ".join(entry.sources))  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 150).print(table)
