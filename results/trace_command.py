"""`longrecall trace routed-scaling`: who applies the routed scaling factor, read from the engine's source.

longrecall trace routed-scaling --sglang 0.5.16 --quant nvfp4 --runner marlin
longrecall trace routed-scaling --sglang ./sglang-checkout --all
longrecall trace routed-scaling --diff 0.5.16 0.5.17 --json
longrecall trace routed-scaling --sglang installed --patch my-fix.patch
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(help="Read a serving engine's source without running it.", no_args_is_help=True)

ALL_CELLS: tuple[tuple[str, str], ...] = (
    ("bf16", "triton"),
    ("bf16", "flashinfer_cutlass"),
    ("bf16", "flashinfer_trtllm"),
    ("bf16", "flashinfer_trtllm_routed"),
    ("fp8", "triton"),
    ("fp8", "deep_gemm"),
    ("fp8", "cutlass"),
    ("fp8", "flashinfer_trtllm"),
    ("fp8", "flashinfer_trtllm_routed"),
    ("nvfp4", "flashinfer_trtllm"),
    ("nvfp4", "flashinfer_trtllm_routed"),
    ("nvfp4", "flashinfer_cutlass"),
    ("nvfp4", "flashinfer_cutedsl"),
    ("nvfp4", "marlin"),
    ("nvfp4", "triton"),
    ("mxfp4", "marlin"),
    ("mxfp4", "flashinfer_mxfp4"),
    ("mxfp4", "flashinfer_cutlass"),
    ("w4afp8", "cutlass"),
)


def _fail(message: str) -> typer.Exit:
    print(f"longrecall: error: {message}", file=sys.stderr)
    return typer.Exit(2)


@app.callback()
def _group() -> None:
    """Read a serving engine's source without running it."""


@app.command("routed-scaling")
def routed_scaling(
    context: typer.Context,
    sglang: Annotated[
        str,
        typer.Option(help="installed (beside longrecall), a checkout, a wheel, a version to download, or reference."),
    ] = "installed",
    model: Annotated[
        str, typer.Option(help="Model file under srt/models: deepseek_v4, deepseek_v2, …")
    ] = "deepseek_v4",
    quant: Annotated[str, typer.Option(help="bf16, fp8, nvfp4, mxfp4, w4afp8, modelopt_fp8")] = "nvfp4",
    runner: Annotated[str, typer.Option(help="--moe-runner-backend of the launch.")] = "flashinfer_trtllm_routed",
    platform: Annotated[str, typer.Option(help="cuda, hip, cpu, npu, xpu")] = "cuda",
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of the launch; may be given again.")] = None,
    patch: Annotated[list[Path] | None, typer.Option(help="Unified diff to read the source with.")] = None,
    every: Annotated[bool, typer.Option("--all", help="The quant x runner matrix.")] = False,
    diff: Annotated[tuple[str, str] | None, typer.Option(help="OLD NEW: the cells that changed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Follow the routed scaling factor from the config to the last multiply, and count."""
    from longrecall.kernels.contract.routed_scaling import Scenario, Trace, trace
    from longrecall.kernels.contract.source_tree import SourceError, SourceTree, open_source
    from longrecall.runners.diffs import with_diffs

    def opened(where: str) -> SourceTree:
        return with_diffs(open_source(where), patch or [])

    def matrix(tree: SourceTree, base: Scenario) -> dict[tuple[str, str], Trace | str]:
        cells: dict[tuple[str, str], Trace | str] = {}
        for cell_quant, cell_runner in ALL_CELLS:
            try:
                cells[cell_quant, cell_runner] = trace(tree, replace(base, quant=cell_quant, runner=cell_runner))
            except SourceError as error:
                cells[cell_quant, cell_runner] = str(error)
        return cells

    try:
        _refuse_ignored(context, sglang, every, diff)
        scenario = Scenario(model=model, quant=quant, runner=runner, platform=platform, env=_environment(env or []))
        if diff is not None:
            old, new = (matrix(opened(where), scenario) for where in diff)
            _print_diff(diff, old, new, as_json)
        elif every:
            _print_matrix(matrix(opened(sglang), scenario), sglang, as_json)
        else:
            _print_trace(trace(opened(sglang), scenario), as_json)
    except SourceError as error:
        raise _fail(str(error)) from None


def _refuse_ignored(context: typer.Context, sglang: str, every: bool, diff: tuple[str, str] | None) -> None:
    """Raise SourceError for options that would choose nothing."""
    from longrecall.kernels.contract.source_tree import SourceError

    flags = {"sglang": "--sglang", "model": "--model", "quant": "--quant", "runner": "--runner",
             "platform": "--platform", "env": "--env", "every": "--all"}  # fmt: skip
    given = [
        name
        for name in flags
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    ]
    if diff is not None:
        where, idle = "--diff", {"sglang", "every", "quant", "runner"}
        why = "it compares every quant and runner of the two sources it names"
        if "reference" in diff:
            raise SourceError("--diff reference: the reference build has one path and no matrix to compare")
    elif sglang == "reference":
        where, idle = "--sglang reference", set(flags) - {"sglang"}
        why = "that build has one model and one path"
    elif every:
        where, idle, why = "--all", {"quant", "runner"}, "it takes every quant and runner"
    else:
        return
    if ignored := [flags[name] for name in given if name in idle]:
        raise SourceError(f"{', '.join(ignored)} cannot be given with {where}: {why}")


def _environment(pairs: list[str]) -> dict[str, str]:
    from longrecall.kernels.contract.source_tree import SourceError

    for pair in pairs:
        if "=" not in pair:
            raise SourceError(f"--env {pair!r} is not NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def _count(layer, part: str = "routed") -> str:  # type: ignore[no-untyped-def]
    if layer is None:
        return "–"
    if layer.refusal is not None:
        return "refuses"
    found = getattr(layer, part)
    return "?" if found is None else " or ".join(str(n) for n in found)


def _print_trace(found, as_json: bool) -> None:  # type: ignore[no-untyped-def]
    if as_json:
        print(json.dumps(found.as_json(), ensure_ascii=False))
        return
    console = Console()
    scenario = found.scenario
    version = f" {found.version}" if found.version and found.version not in found.origin else ""
    console.print(
        f"[bold]{found.origin}[/]{version}: {scenario.model}, {scenario.quant} on {scenario.runner}, "
        f"{scenario.platform}"
    )
    for site in found.as_json()["sites"]:
        mark = f"[bold]x factor[/] in {', '.join(site['layers'])} layers" if site["applies"] else "no effect"
        console.print(f"{site['file']}:{site['line']}  {mark}", soft_wrap=True)
        console.print(f"    {site['code'][:110]}", markup=False, soft_wrap=True)
        console.print(f"    {site['where']}; {site['condition'][:160]}", style="dim", markup=False, soft_wrap=True)
    for kind, layer in found.layers.items():
        line = f"{kind} layers: routed factor^{_count(layer)}, shared factor^{_count(layer, 'shared')}"
        if layer.refusal is not None:
            line = f"{kind} layers: refused at {layer.refusal.file}:{layer.refusal.line}: {layer.refusal.message}"
        console.print(line, markup=False)
        for text in layer.unresolved:
            console.print(f"  not resolved: {text}", markup=False)
    console.print(f"[bold]verdict: {found.verdict}[/]")
    console.print("assumed: " + "; ".join(found.as_json()["assumed"]), style="dim", markup=False)


def _row(cell) -> dict[str, object]:  # type: ignore[no-untyped-def]
    if isinstance(cell, str):
        return {"verdict": "cannot tell", "error": cell}
    return {
        "verdict": cell.verdict,
        "routed": {kind: _count(layer) for kind, layer in cell.layers.items()},
        "shared": {kind: _count(layer, "shared") for kind, layer in cell.layers.items()},
    }


def _summary(row: dict[str, object]) -> str:
    counts = row.get("routed")
    detail = ", ".join(f"{k} {v}" for k, v in counts.items()) if isinstance(counts, dict) else str(row.get("error", ""))
    return f"{row['verdict']} ({detail})"


def _print_matrix(cells, origin: str, as_json: bool) -> None:  # type: ignore[no-untyped-def]
    rows = {f"{quant}/{runner}": _row(cell) for (quant, runner), cell in cells.items()}
    if as_json:
        print(json.dumps({"origin": origin, "cells": rows}, ensure_ascii=False))
        return
    table = Table("quant", "runner", "hash", "other", "shared", "verdict", title=origin)
    for (quant, runner), cell in cells.items():
        if isinstance(cell, str):
            table.add_row(quant, runner, "–", "–", "–", f"not in this source: {cell[:70]}")
            continue
        shared = "/".join(sorted({_count(layer, "shared") for layer in cell.layers.values()}))
        hash_count, other_count = _count(cell.layers.get("hash")), _count(cell.layers.get("other"))
        table.add_row(quant, runner, hash_count, other_count, shared, cell.verdict)
    Console().print(table)


def _print_diff(names, old, new, as_json: bool) -> None:  # type: ignore[no-untyped-def]
    changed = {
        f"{quant}/{runner}": {"old": _row(old[quant, runner]), "new": _row(new[quant, runner])}
        for quant, runner in ALL_CELLS
        if _comparable(old[quant, runner]) != _comparable(new[quant, runner])
    }
    if as_json:
        print(json.dumps({"old": names[0], "new": names[1], "changed": changed}, ensure_ascii=False))
        return
    if not changed:
        print(f"no cell of the quant x runner matrix differs between {names[0]} and {names[1]}")
        return
    table = Table("quant/runner", names[0], names[1])
    for cell, sides in changed.items():
        table.add_row(cell, *(_summary(side) for side in sides.values()))
    Console().print(table)


def _comparable(cell) -> object:  # type: ignore[no-untyped-def]
    row = _row(cell)
    return (row["verdict"], str(row.get("routed")), str(row.get("shared")))
