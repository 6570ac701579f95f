"""`longrecall bench moe`: the expert path and its sum-reduce beside torch._grouped_mm and a floor.

    longrecall bench moe                                  # V4-Flash, bf16, 1, 64 and 4096 tokens
    longrecall bench moe --tokens 64 --tune               # also try every candidate tile and use the best
    longrecall bench moe --experts 8 --hidden 256 --intermediate 128 --tokens 16    # what a CPU can do in a second

Every output is held to the fp64 reference before anything is timed; a wrong one stops the benchmark. Times are
medians (and p20, p80) with a cold L2 cache; the clock starts after a pause on the GPU that hides the launches. The
floor is the larger of the bytes that must move over the measured copy rate and the operations over the measured
matmul rate. The last line on standard output is one JSON document.
"""

import json
import math
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from longrecall.kernels.moe.timing import Clock, ceilings

PEER = "torch._grouped_mm"


def _grouped_mm_path(x: Any, w13: Any, w2: Any, chosen: Any, limit: float | None, factor: float) -> Callable[[], Any]:
    """The peer: torch._grouped_mm for both GEMMs, plain torch around them."""
    import torch

    from longrecall.kernels.moe.experts import swiglu

    T, K = chosen.idx.shape
    E = w13.shape[0]
    edges = torch.arange(1, E + 1, dtype=torch.int32, device=x.device)
    first, second = w13.transpose(1, 2), w2.transpose(1, 2)  # column-major operands, no copy

    def path() -> Any:
        experts, order = chosen.idx.reshape(-1).to(torch.int32).sort(stable=True)
        ends = torch.searchsorted(experts, edges, out_int32=True)
        gate, up = torch._grouped_mm(x[order // K], first, offs=ends).chunk(2, -1)
        y = torch._grouped_mm(swiglu(gate, up, limit), second, offs=ends)
        rows = torch.empty_like(y)
        rows[order] = y
        weights = (chosen.weights * factor).to(x.dtype)[:, None]
        return torch.bmm(weights, rows.view(T, K, -1)).squeeze(1)

    return path


def _relative_error(got: Any, want: Any) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def _candidates(block_m: int, which: str) -> list[Any]:
    from longrecall.kernels.moe.kernel import Tile

    if block_m <= 16:
        gate_up = [(16, 256, 4, 3), (16, 128, 4, 5), (32, 128, 4, 3), (32, 128, 4, 4), (64, 64, 4, 4), (64, 128, 4, 3)]
        down = [(32, 128, 4, 5), (32, 256, 4, 3), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 3)]
    else:
        gate_up = [(128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 8, 3), (64, 64, 8, 4), (64, 64, 4, 3)]
        down = [(256, 64, 8, 3), (256, 64, 8, 4), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3)]
    shapes = gate_up if which == "gate_up" else down
    return [Tile(block_m, n, k, warps, stages, tma) for n, k, warps, stages in shapes for tma in (False, True)]


def _tune(
    clock: Clock, x: Any, w13: Any, w2: Any, chosen: Any, limit: float | None, tiles: Any
) -> tuple[Any, list[Any]]:
    """The fastest tile of each GEMM among the candidates, and every measurement."""
    import triton

    from longrecall.kernels.moe import kernel

    K = chosen.idx.shape[1]
    plan = kernel.make_plan(chosen.idx, w13.shape[0], tiles.gate_up.m)
    h = kernel.gate_up(x, w13, plan, K, tiles.gate_up, limit)
    weights = chosen.weights.float()
    best: dict[str, Any] = {}
    rows = []
    for which in ("gate_up", "down"):
        for tile in _candidates(tiles.gate_up.m, which):

            def launch(tile: Any = tile, which: str = which) -> object:
                if which == "gate_up":
                    return kernel.gate_up(x, w13, plan, K, tile, limit)
                return kernel.down(h, w2, weights, plan, tile)

            try:
                took = clock(launch, 7, warmup=2)["p50_ms"]
            except triton.runtime.errors.OutOfResources as error:
                rows.append({"gemm": which, **tile._asdict(), "p50_ms": None, "why": str(error).splitlines()[0]})
                continue
            rows.append({"gemm": which, **tile._asdict(), "p50_ms": took})
            if which not in best or took < best[which][0]:
                best[which] = (took, tile)
    return kernel.Tiles(best["gate_up"][1], best["down"][1]), rows


def _gpu_parts(
    clock: Clock, x: Any, w13: Any, w2: Any, chosen: Any, limit: float | None, tiles: Any, repeats: int
) -> Any:
    from longrecall.kernels.moe import kernel

    K, E = chosen.idx.shape[1], w13.shape[0]
    plan = kernel.make_plan(chosen.idx, E, tiles.gate_up.m)
    h = kernel.gate_up(x, w13, plan, K, tiles.gate_up, limit)
    weights = chosen.weights.float()
    return {
        "plan": clock(lambda: kernel.make_plan(chosen.idx, E, tiles.gate_up.m), repeats)["p50_ms"],
        "gate_up": clock(lambda: kernel.gate_up(x, w13, plan, K, tiles.gate_up, limit), repeats)["p50_ms"],
        "down": clock(lambda: kernel.down(h, w2, weights, plan, tiles.down), repeats)["p50_ms"],
    }


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """One layer's weights on the device, and what times calls on it."""

    preset: Any
    device: str
    dtype: Any
    clock: Clock
    ceilings: dict[str, float]
    generator: Any
    w13: Any
    w2: Any
    repeats: int

    @property
    def limit(self) -> float:
        """Largest relative error that is rounding: in bf16 h, y and the sum are each rounded once, 2^-9 relative."""
        return 1e-2 if self.w13.element_size() == 2 else 1e-5

    def normal(self, *shape: int) -> Any:
        return _normal(shape, self.device, self.dtype, self.generator)

    def floor_ms(self, bytes_moved: float, operations: float) -> float:
        return max(bytes_moved / self.ceilings["copy_gb_s"] / 1e6, operations / self.ceilings["matmul_tflop_s"] / 1e9)


def _normal(shape: tuple[int, ...], device: str, dtype: Any, generator: Any) -> Any:
    import torch

    t = torch.empty(*shape, dtype=dtype, device=device)
    return t.normal_(generator=generator).mul_(shape[-1] ** -0.5)


def _row(op: str, provider: str, tokens: int, floor_ms: float, took: dict[str, float], **more: Any) -> dict[str, Any]:
    over = took["p50_ms"] / floor_ms
    return {"op": op, "provider": provider, "tokens": tokens, "floor_ms": floor_ms, "over_floor": over, **took, **more}


def _expert_rows(problem: _Problem, tokens: int, tune: bool) -> list[dict[str, Any]]:
    """Experts and combine, ours and torch._grouped_mm's; RuntimeError when ours is wrong."""
    import torch

    from longrecall.kernels.moe.combine import moe_sum_reduce
    from longrecall.kernels.moe.experts import moe_experts
    from longrecall.kernels.moe.reference import moe_experts_ref, moe_sum_reduce_ref
    from longrecall.kernels.moe.routing import TopK, topk

    p, w13, w2, T = problem.preset, problem.w13, problem.w2, tokens
    E, K, C, F = p.num_experts, p.num_topk, p.hidden, p.intermediate_hidden
    x = problem.normal(T, C) * math.sqrt(C)
    logits = torch.randn(T, E, device=problem.device, generator=problem.generator)
    chosen = topk(logits, None, K, p.scoring, routed_scaling_factor=p.routed_scaling_factor)
    tiles: Any = None
    more: dict[str, Any] = {"active_experts": int(chosen.idx.unique().numel())}
    if problem.device == "cuda":
        from longrecall.kernels.moe.kernel import moe_experts_triton, tiles_for

        tiles = tiles_for(T * K / min(E, T * K))
        if tune:
            tiles, more["tried"] = _tune(problem.clock, x, w13, w2, chosen, p.swiglu_limit, tiles)

    def ours() -> Any:
        if tiles is None:
            y = moe_experts(x, w13, w2, chosen, swiglu_limit=p.swiglu_limit)
        else:
            y = moe_experts_triton(x, w13, w2, chosen, swiglu_limit=p.swiglu_limit, tiles=tiles)
        return moe_sum_reduce(y, None, p.routed_scaling_factor)

    some = slice(0, min(T, 8))
    few = TopK(chosen.weights[some], chosen.idx[some])
    rows = moe_experts_ref(x[some], w13, w2, few, swiglu_limit=p.swiglu_limit)
    want = moe_sum_reduce_ref(rows, None, p.routed_scaling_factor)
    got = ours()
    error = _relative_error(got[some], want)
    if not (error < problem.limit and bool(got.isfinite().all())):
        raise RuntimeError(f"wrong result at {T} tokens: relative error {error:.2e}, limit {problem.limit:.0e}")
    floor_ms = problem.floor_ms(
        (more["active_experts"] * 3 * C * F + 2 * T * C) * w13.element_size(), 2 * T * K * 3 * C * F
    )
    if tiles is not None:
        more["tiles"] = {name: tile._asdict() for name, tile in tiles._asdict().items()}
        more["parts_ms"] = _gpu_parts(problem.clock, x, w13, w2, chosen, p.swiglu_limit, tiles, problem.repeats)
    provider = "longrecall" if tiles is None else "longrecall triton"
    found = [
        _row(
            "experts+combine",
            provider,
            T,
            floor_ms,
            problem.clock(ours, problem.repeats),
            error_vs_fp64=error,
            **more,
        )
    ]
    peer = _grouped_mm_path(x, w13, w2, chosen, p.swiglu_limit, p.routed_scaling_factor)
    try:
        peer_error = _relative_error(peer()[some], want)
        took = problem.clock(peer, problem.repeats)
    except (RuntimeError, AttributeError, NotImplementedError) as why:
        found.append({"op": "experts+combine", "provider": PEER, "tokens": T, "why": str(why)[:200]})
    else:
        found.append(_row("experts+combine", PEER, T, floor_ms, took, error_vs_fp64=peer_error))
    return found


def _reduce_rows(problem: _Problem, tokens: int, tune: bool) -> list[dict[str, Any]]:
    """The sum-reduce alone, ours and torch eager's; RuntimeError when ours is wrong."""
    from longrecall.kernels.moe.combine import moe_sum_reduce
    from longrecall.kernels.moe.reference import moe_sum_reduce_ref

    p = problem.preset
    factor = p.routed_scaling_factor
    y = problem.normal(tokens, p.num_topk, p.hidden)
    error = _relative_error(moe_sum_reduce(y, None, factor), moe_sum_reduce_ref(y, None, factor))
    if not error < problem.limit:
        raise RuntimeError(f"wrong sum-reduce at {tokens} tokens: relative error {error:.2e}")
    floor_ms = problem.floor_ms(tokens * (p.num_topk + 1) * p.hidden * y.element_size(), 0)
    tried = []
    if tune and problem.device == "cuda":
        from longrecall.kernels.moe.kernel import moe_sum_reduce_triton

        for block, warps in ((512, 2), (512, 4), (1024, 2), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8)):
            launch = partial(moe_sum_reduce_triton, y, None, factor, block=block, warps=warps)
            tried.append({"block": block, "warps": warps, **problem.clock(launch, problem.repeats)})
    ours = problem.clock(lambda: moe_sum_reduce(y, None, factor), problem.repeats)
    eager = problem.clock(lambda: y.sum(1).mul_(factor), problem.repeats)
    return [
        _row("sum-reduce", "longrecall", tokens, floor_ms, ours, error_vs_fp64=error, tried=tried),
        _row("sum-reduce", "torch eager", tokens, floor_ms, eager),
    ]


def measure(
    tokens: list[int],
    *,
    preset_name: str = "v4-flash",
    experts: int | None = None,
    hidden: int | None = None,
    intermediate: int | None = None,
    tune: bool = False,
    repeats: int = 30,
    seed: int = 0,
) -> dict[str, Any]:
    """The whole benchmark document. ValueError for sizes that do not fit, RuntimeError when an output is wrong."""
    import torch

    from longrecall.kernels.moe.presets import preset

    p = preset(preset_name)
    p = replace(
        p,
        num_experts=experts or p.num_experts,
        hidden=hidden or p.hidden,
        intermediate_hidden=intermediate or p.intermediate_hidden,
    )
    if p.num_topk > p.num_experts:
        raise ValueError(f"--experts {p.num_experts} is fewer than the {p.num_topk} that {p.name} selects")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    need = 3 * p.num_experts * p.hidden * p.intermediate_hidden * (2 if device == "cuda" else 4)
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    if need > 0.6 * free:
        raise ValueError(
            f"{p.name} with {p.num_experts} experts needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: "
            "take fewer with --experts, --hidden, --intermediate"
        )
    clock = Clock(device)
    generator = torch.Generator(device).manual_seed(seed)
    E, C, F = p.num_experts, p.hidden, p.intermediate_hidden
    problem = _Problem(
        preset=p,
        device=device,
        dtype=dtype,
        clock=clock,
        ceilings=ceilings(clock, device, dtype),
        generator=generator,
        w13=_normal((E, 2 * F, C), device, dtype, generator),
        w2=_normal((E, C, F), device, dtype, generator),
        repeats=repeats,
    )
    rows: list[dict[str, Any]] = []
    for count in tokens:
        rows += _expert_rows(problem, count, tune) + _reduce_rows(problem, count, tune)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    if device == "cuda":
        import triton

        versions["triton"] = triton.__version__
    return {
        "benchmark": "moe",
        "preset": asdict(p),
        "dtype": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "versions": versions,
        "commit": os.environ.get("LONGRECALL_COMMIT") or _commit(),
        "seed": seed,
        "repeats": repeats,
        "ceilings": problem.ceilings,
        "rows": rows,
    }


def _commit() -> str | None:
    import subprocess

    root = Path(__file__).resolve().parents[2]
    try:
        out = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return out.stdout.strip() or None


def _print_row(row: dict[str, Any]) -> None:
    head = f"{row['op']:<16} {row['provider']:<18} {row['tokens']:>6} tokens"
    if "p50_ms" not in row:
        typer.echo(f"{head}  not measured: {row['why']}")
        return
    typer.echo(
        f"{head}  {row['p50_ms']:9.3f} ms  (p20 {row['p20_ms']:.3f}, p80 {row['p80_ms']:.3f})  "
        f"floor {row['floor_ms']:.3f} ms  x{row['over_floor']:.2f}"
    )
    if "parts_ms" in row:
        typer.echo("    " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in row["parts_ms"].items()))
        for name, tile in row["tiles"].items():
            typer.echo(f"    {name}: {tile}")


def bench(
    tokens: Annotated[str, typer.Option(help="Token counts, comma-separated.")] = "1,64,4096",
    preset: Annotated[str, typer.Option(help="v2, v3, v3.2, v4-flash, v4-pro or glm-5.")] = "v4-flash",
    experts: Annotated[int | None, typer.Option(help="Instead of the preset's number of experts.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Instead of the preset's hidden size.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Instead of the preset's expert size.")] = None,
    tune: Annotated[bool, typer.Option(help="Try every candidate tile on a GPU and use the fastest.")] = False,
    repeats: Annotated[int, typer.Option(help="Timed calls per row.")] = 30,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON document here.")] = None,
) -> None:
    """Mixture of experts: the expert path and its sum-reduce beside torch._grouped_mm and a floor."""
    try:
        counts = [int(part) for part in tokens.split(",")]
        if min(counts) < 1:
            raise ValueError
    except ValueError:
        typer.echo(f"longrecall: error: --tokens {tokens!r} is not a list of positive numbers like 1,64,4096", err=True)
        raise typer.Exit(2) from None
    try:
        document = measure(
            counts,
            preset_name=preset,
            experts=experts,
            hidden=hidden,
            intermediate=intermediate,
            tune=tune,
            repeats=repeats,
            seed=seed,
        )
    except ValueError as error:
        typer.echo(f"longrecall: error: {error}", err=True)
        raise typer.Exit(2) from None
    except RuntimeError as error:
        typer.echo(f"longrecall: error: {error}", err=True)
        raise typer.Exit(3) from None
    typer.echo(f"{document['device']}, {document['dtype']}, {document['versions']}")
    rates = document["ceilings"]
    typer.echo(f"copy {rates['copy_gb_s']:.0f} GB/s, matmul {rates['matmul_tflop_s']:.2f} TFLOP/s")
    for row in document["rows"]:
        _print_row(row)
    text = json.dumps(document, separators=(",", ":"))
    if out is not None:
        temporary = out.with_suffix(out.suffix + ".tmp")
        temporary.write_text(text + "\n")
        os.replace(temporary, out)
    typer.echo(text)
