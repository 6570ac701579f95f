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
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer


def _percentiles(samples_ms: list[float]) -> dict[str, float]:
    ordered = sorted(samples_ms)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

    return {"p20_ms": at(0.2), "p50_ms": statistics.median(ordered), "p80_ms": at(0.8)}


class _Clock:
    """Times calls with a cold cache: device events on a GPU, the wall clock on a CPU."""

    def __init__(self, device: str) -> None:
        import torch

        self.cuda = device == "cuda"
        self.torch = torch
        self.flush = torch.empty(256 << 20 if self.cuda else 64 << 20, dtype=torch.uint8, device=device)

    def __call__(self, function: Callable[[], object], repeats: int, warmup: int = 3) -> dict[str, float]:
        for _ in range(warmup):
            function()
        samples = []
        for _ in range(repeats):
            self.flush.zero_()
            if self.cuda:
                start, stop = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.torch.cuda._sleep(2_000_000)  # about a millisecond: the host launches everything meanwhile
                start.record()
                function()
                stop.record()
                stop.synchronize()
                samples.append(start.elapsed_time(stop))
            else:
                begin = time.perf_counter()
                function()
                samples.append((time.perf_counter() - begin) * 1e3)
        return _percentiles(samples)


def _ceilings(clock: _Clock, device: str, dtype: Any) -> dict[str, float]:
    import torch

    n = 1 << 30 if clock.cuda else 1 << 26
    source = torch.randint(0, 255, (n,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = clock(lambda: target.copy_(source), 10)["p50_ms"]
    size = 8192 if clock.cuda else 1024
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    matmul = clock(lambda: a @ b, 10)["p50_ms"]
    return {"copy_gb_s": 2 * n / copy / 1e6, "matmul_tflop_s": 2 * size**3 / matmul / 1e9}


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
    clock: _Clock, x: Any, w13: Any, w2: Any, chosen: Any, limit: float | None, tiles: Any
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
    clock: _Clock, x: Any, w13: Any, w2: Any, chosen: Any, limit: float | None, tiles: Any, repeats: int
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
    """Every row of the benchmark; RuntimeError when an output is wrong."""
    import torch

    from longrecall.kernels.moe.combine import moe_sum_reduce
    from longrecall.kernels.moe.experts import moe_experts
    from longrecall.kernels.moe.presets import preset
    from longrecall.kernels.moe.reference import moe_experts_ref, moe_sum_reduce_ref
    from longrecall.kernels.moe.routing import TopK, topk

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
    element = 2 if dtype == torch.bfloat16 else 4
    E, K, C, F = p.num_experts, p.num_topk, p.hidden, p.intermediate_hidden
    need = 3 * E * C * F * element
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else 4 << 30
    if need > 0.8 * free:
        raise ValueError(
            f"{p.name} with {E} experts needs {need / 1e9:.1f} GB of weights; {free / 1e9:.1f} GB can be used here: "
            "choose fewer with --experts, --hidden, --intermediate"
        )
    clock = _Clock(device)
    ceilings = _ceilings(clock, device, dtype)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Any:
        t = torch.empty(*shape, dtype=dtype, device=device)
        return t.normal_(generator=generator).mul_(shape[-1] ** -0.5)

    w13, w2 = normal(E, 2 * F, C), normal(E, C, F)
    rows: list[dict[str, Any]] = []
    for T in tokens:
        x = normal(T, C) * math.sqrt(C)
        logits = torch.randn(T, E, device=device, generator=generator)
        chosen = topk(logits, None, K, p.scoring, routed_scaling_factor=p.routed_scaling_factor)
        active = int(chosen.idx.unique().numel())
        tiles: Any = None
        tried: list[Any] = []
        if device == "cuda":
            from longrecall.kernels.moe.kernel import moe_experts_triton, tiles_for

            tiles = tiles_for(T * K / min(E, T * K))
            if tune:
                tiles, tried = _tune(clock, x, w13, w2, chosen, p.swiglu_limit, tiles)

        def ours(chosen: Any = chosen, x: Any = x, tiles: Any = tiles) -> Any:
            if tiles is None:
                y = moe_experts(x, w13, w2, chosen, swiglu_limit=p.swiglu_limit)
            else:
                y = moe_experts_triton(x, w13, w2, chosen, swiglu_limit=p.swiglu_limit, tiles=tiles)
            return moe_sum_reduce(y, None, p.routed_scaling_factor)

        peer = _grouped_mm_path(x, w13, w2, chosen, p.swiglu_limit, p.routed_scaling_factor)
        some = slice(0, min(T, 8))
        few = TopK(chosen.weights[some], chosen.idx[some])
        want = moe_sum_reduce_ref(
            moe_experts_ref(x[some], w13, w2, few, swiglu_limit=p.swiglu_limit), None, p.routed_scaling_factor
        )
        got = ours()
        error = _relative_error(got[some], want)
        # bf16: h, y and the sum are each rounded once, 2^-9 relative each
        limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
        if not (error < limit and bool(got.isfinite().all())):
            raise RuntimeError(f"wrong result at {T} tokens: relative error {error:.2e}, limit {limit:.0e}")
        bytes_moved = (active * 3 * C * F + 2 * T * C) * element
        operations = 2 * T * K * 3 * C * F
        floor_ms = max(bytes_moved / ceilings["copy_gb_s"] / 1e6, operations / ceilings["matmul_tflop_s"] / 1e9)
        took = clock(ours, repeats)
        row: dict[str, Any] = {
            "op": "experts+combine",
            "provider": "longrecall" if device == "cpu" else "longrecall triton",
            "tokens": T,
            "active_experts": active,
            "error_vs_fp64": error,
            "floor_ms": floor_ms,
            "over_floor": took["p50_ms"] / floor_ms,
            **took,
        }
        if tiles is not None:
            row["tiles"] = {name: tile._asdict() for name, tile in tiles._asdict().items()}
            row["parts_ms"] = _gpu_parts(clock, x, w13, w2, chosen, p.swiglu_limit, tiles, repeats)
            row["tried"] = tried
        rows.append(row)
        try:
            other = peer()
            peer_error = _relative_error(other[some], want)
            took = clock(peer, repeats)
            rows.append(
                {
                    "op": "experts+combine",
                    "provider": "torch._grouped_mm",
                    "tokens": T,
                    "error_vs_fp64": peer_error,
                    "floor_ms": floor_ms,
                    "over_floor": took["p50_ms"] / floor_ms,
                    **took,
                }
            )
        except (RuntimeError, AttributeError, NotImplementedError) as problem:
            rows.append(
                {"op": "experts+combine", "provider": "torch._grouped_mm", "tokens": T, "why": str(problem)[:200]}
            )
        y = normal(T, K, C)
        reduce_error = _relative_error(
            moe_sum_reduce(y, None, p.routed_scaling_factor), moe_sum_reduce_ref(y, None, p.routed_scaling_factor)
        )
        if not reduce_error < limit:
            raise RuntimeError(f"wrong sum-reduce at {T} tokens: relative error {reduce_error:.2e}")
        floor_ms = T * (K + 1) * C * element / ceilings["copy_gb_s"] / 1e6
        reducers: dict[str, Callable[[Any], Any]] = {
            "longrecall": lambda y: moe_sum_reduce(y, None, p.routed_scaling_factor),
            "torch eager": lambda y: y.sum(1).mul_(p.routed_scaling_factor),
        }
        for provider, reduce in reducers.items():
            took = clock(partial(reduce, y), repeats)
            rows.append(
                {
                    "op": "sum-reduce",
                    "provider": provider,
                    "tokens": T,
                    "error_vs_fp64": reduce_error if provider == "longrecall" else None,
                    "floor_ms": floor_ms,
                    "over_floor": took["p50_ms"] / floor_ms,
                    **took,
                }
            )
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
        "ceilings": ceilings,
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
