"""One case of `longrecall bench indexer` in a process of its own: inputs, peers, checks and times.

    echo '{"case": "score:1x4K:bf16", "to": "rows.json"}' | python -m longrecall.kernels.indexer.bench_cases cpu

Where the keys lie in memory and what ran before move a time by several percent (docs/benchmarks/indexer.md), so that
no case shares a process with another. The peers of a case are timed in the same process, on the same inputs.
"""

import argparse
import ctypes
import gc
import importlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrecall.kernels.indexer.cli import UsageError, parse_lengths, write_atomically
from longrecall.kernels.indexer.peers import Make, Peers, Select, compiled_scores, deep_gemm_scores, torch_topk

if TYPE_CHECKING:
    from torch import Tensor

HEADS, DIM, K = 64, 128, 512
DTYPES = ("fp32", "bf16", "fp8")


class BenchError(RuntimeError):
    """A result that is wrong: it is not timed."""


@dataclass(frozen=True, kw_only=True)
class Row:
    op: str
    """score+select, score (peers that do no more), or select."""
    provider: str
    shape: str
    dtype: str
    unit: str
    p20: float
    p50: float
    p80: float
    extra_mb: float | None
    """Peak memory above the inputs."""
    worst_tie: float | None
    """Furthest wrong pick from the k-th score, in standard deviations of the row's scores; 0: the exact set."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    rows: int
    keys: int
    distinct: bool

    @classmethod
    def parse(cls, text: str) -> "Shape":
        body, _, tail = text.strip().partition("-")
        rows, cross, keys = body.partition("x")
        if not cross or not rows.isdigit() or tail not in ("", "distinct"):
            raise UsageError(f"shape {text!r} is not queries x keys such as 4096x128K or 64x128K-distinct")
        return cls(rows=int(rows), keys=parse_lengths(keys)[0], distinct=bool(tail))

    @property
    def name(self) -> str:
        keys = next(
            (f"{self.keys // n}{unit}" for n, unit in ((1 << 20, "M"), (1024, "K")) if self.keys % n == 0), None
        )
        keys = keys or str(self.keys)
        return f"{self.rows}x{keys}" + ("-distinct" if self.distinct else "")


@dataclass(frozen=True, kw_only=True)
class CaseName:
    """`score:64x128K-distinct:fp8` or `select:1x4K`."""

    shape: Shape
    dtype: str | None
    """Of the keys; None for a top-k alone."""

    @classmethod
    def parse(cls, text: str) -> "CaseName":
        op, _, rest = text.strip().partition(":")
        shape, _, dtype = rest.partition(":")
        if (op, dtype) != ("select", "") and (op != "score" or dtype not in DTYPES):
            raise UsageError(
                f"case {text!r} is neither score:QUERIESxKEYS:DTYPE, as score:64x128K-distinct:fp8 "
                f"({', '.join(DTYPES)}), nor select:QUERIESxKEYS"
            )
        made = cls(shape=Shape.parse(shape), dtype=dtype or None)
        if made.shape.distinct and dtype in ("", "fp32"):
            raise UsageError(f"case {text!r}: keys of each query are scored in bf16 and fp8 alone")
        return made

    def __str__(self) -> str:
        return f"select:{self.shape.name}" if self.dtype is None else f"score:{self.shape.name}:{self.dtype}"


def machine(device: str) -> dict[str, Any]:
    import torch

    triton = sys.modules.get("triton")
    cpu = platform.processor()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "device": device,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", None),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def _quantiles(times: list[float]) -> tuple[float, float, float]:
    times = sorted(times)
    return tuple(round(times[min(len(times) - 1, int(len(times) * p))], 2) for p in (0.2, 0.5, 0.8))  # type: ignore[return-value]


def time_cpu(call: Callable[[], object], *, seconds: float = 2.0) -> tuple[float, float, float]:
    """CPU time of single calls on this thread with cold caches, until `seconds` have passed; at least 5.

    CPU time, because a busy machine's wall time says who else ran; with more threads than one it is wall time.
    """
    import torch

    flush = torch.empty(16 << 20)
    call()
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begun < seconds:
        flush.zero_()
        start = clock()
        call()
        times.append((clock() - start) * 1e6)
    return _quantiles(times)


HOST_CYCLES = 400_000
"""The device waits about 200 us before each timed replay: longer than a host takes to queue it (seen: up to 100)."""


def time_gpu(call: Callable[[], object], *, repeats: int) -> tuple[float, float, float]:
    """Device time of replays of one captured call between events, L2 overwritten before each."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        call()
    flush = torch.empty(64 << 20, device="cuda")
    times = []
    for _ in range(repeats):
        flush.zero_()
        torch.cuda._sleep(HOST_CYCLES)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        captured.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return _quantiles(times)


def worst_tie(selection: "Tensor", scores: "Tensor", k: int) -> float:
    """0 for the exact set, else the furthest differing pick from the k-th score in the row's standard deviations."""
    from longrecall.kernels.indexer.topk import select_topk

    want = select_topk(scores.clone(), k)
    worst = 0.0
    for row in range(scores.shape[0]):
        mine, theirs = set(selection[row].tolist()) - {-1}, set(want[row].tolist()) - {-1}
        if len(mine) != len(theirs):
            return float("inf")
        if mine != theirs:
            kth, spread = scores[row][want[row].long()].min(), scores[row].std()
            worst = max(worst, max(float((scores[row, j] - kth).abs() / spread) for j in mine ^ theirs))
    return worst


@dataclass(kw_only=True, eq=False)
class Case:
    """Inputs of one shape and dtype on one device, and the scores of a few of its rows."""

    shape: Shape
    dtype: str
    q: Any
    keys: Any
    weights: "Tensor"
    visible: "Tensor"
    probes: list[int]
    probe_scores: "Tensor"

    def check(self, provider: str, selection: "Tensor", tolerance: float) -> float:
        found = worst_tie(selection[self.probes], self.probe_scores, K)
        if found > tolerance:
            raise BenchError(
                f"{provider} at {self.shape.name} {self.dtype} picks a key {found:.2g} standard deviations from the "
                f"k-th score; {tolerance:g} is allowed"
            )
        return found


def make_case(shape: Shape, dtype: str, device: str) -> Case:
    import torch

    from longrecall.kernels.indexer.formats import Packed, decode_bytes, dequantize, quantize
    from longrecall.kernels.indexer.reference import indexer_logits_ref

    generator = torch.Generator(device=device).manual_seed(shape.rows + shape.keys)
    some = {"device": device, "generator": generator}
    q = torch.randn(shape.rows, HEADS, DIM, **some)  # type: ignore[call-overload]
    many = (shape.rows, shape.keys) if shape.distinct else (shape.keys,)
    keys = torch.randn(*many, DIM, dtype=torch.bfloat16, **some)  # type: ignore[call-overload]
    weights = torch.randn(shape.rows, HEADS, **some)  # type: ignore[call-overload]
    fast: Any
    store: Any
    if dtype == "fp8":
        fast = quantize(q, "fp8")
        if shape.distinct:  # one row at a time: the fp32 copy of 64 x 128K keys would not be small
            parts = [quantize(row, "fp8") for row in keys]
            data, scale = torch.stack([p.data for p in parts]), torch.stack([p.scale for p in parts])  # type: ignore[misc]
            store = Packed(fmt="fp8", data=data, scale=scale)
        else:
            store = quantize(keys, "fp8")
    else:
        wide = torch.bfloat16 if dtype == "bf16" else torch.float32
        fast, store = q.to(wide), keys.to(wide)
    if dtype == "fp8":
        # folded beforehand, as servers do in the kernel that quantises the query
        weights, fast = weights * fast.scale.squeeze(-1), Packed(fmt="fp8", data=fast.data, scale=None)
    probes = sorted({0, shape.rows // 2, shape.rows - 1})
    scores = []
    for row in probes:
        if dtype == "fp8":
            own = store if not shape.distinct else Packed(fmt="fp8", data=store.data[row], scale=store.scale[row])
            values, query = dequantize(own), decode_bytes(fast.data[row : row + 1], "e4m3fn")
        else:
            values, query = (store[row] if shape.distinct else store).float(), fast[row : row + 1].float()
        scores.append(indexer_logits_ref(query, values, weights[row : row + 1]))
    visible = torch.full((shape.rows,), shape.keys, dtype=torch.int32, device=device)
    return Case(
        shape=shape, dtype=dtype, q=fast, keys=store, weights=weights, visible=visible, probes=probes,
        probe_scores=torch.cat(scores),
    )  # fmt: skip


def _extra_resident_mb(call: Callable[[], object]) -> float | None:
    """Peak of resident memory during a call above what was resident before it; None where Linux does not say."""
    if not (status := Path("/proc/self/status")).is_file():
        return None
    call()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident_kb(status, "VmRSS")
    call()
    return round((_resident_kb(status, "VmHWM") - before) / 1e3, 1)


def _resident_kb(status: Path, field: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1])


def _extra_mb(call: Callable[[], object], device: str) -> float | None:
    if device != "cuda":
        return _extra_resident_mb(call)
    import torch

    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)


def _torch_score_select(case: Case) -> Callable[[], "Tensor"]:
    """What a plain torch user writes: bf16 products of a block of queries, ReLU, head sum, torch.topk.

    fp8 keys are expanded before the clock starts.
    """
    import torch

    from longrecall.kernels.indexer.formats import Packed, decode_bytes, dequantize

    wide = torch.float32 if case.dtype == "fp32" else torch.bfloat16
    q = decode_bytes(case.q.data, "e4m3fn", wide) if isinstance(case.q, Packed) else case.q
    if not isinstance(case.keys, Packed):
        keys = case.keys
    elif case.shape.distinct:
        assert case.keys.scale is not None
        parts = zip(case.keys.data, case.keys.scale, strict=True)
        keys = torch.stack([dequantize(Packed(fmt="fp8", data=d, scale=s)).to(wide) for d, s in parts])
    else:
        keys = dequantize(case.keys).to(wide)
    weights = case.weights
    block = max(1, (1 << 31) // (HEADS * case.shape.keys * 4))

    def call() -> "Tensor":
        out = []
        for start in range(0, case.shape.rows, block):
            part = q[start : start + block]
            if case.shape.distinct:
                dots = part @ keys[start : start + block].transpose(1, 2)
            else:
                dots = (part.flatten(0, 1) @ keys.T).view(part.shape[0], HEADS, -1)
            scores = torch.bmm(weights[start : start + block].unsqueeze(1), dots.relu_().float()).squeeze(1)
            out.append(scores.topk(K, dim=1, sorted=False).indices)
        return torch.cat(out)

    return call


def _far_off(case: Case, scores: "Tensor") -> float:
    """Largest error of a probed row's scores, in standard deviations of the row."""
    found = (scores[case.probes].float() - case.probe_scores).abs().amax(1) / case.probe_scores.std(1)
    return float(found.max())


def _peer_scores(case: Case, peers: Peers) -> Iterator[tuple[str, Callable[[], "Tensor"]]]:
    """Peers that score and leave the selection to others: name, call."""
    if case.dtype == "fp8" and (module := peers.load("deep_gemm", distribution="sgl-deep-gemm")) is not None:
        import torch

        fp8 = torch.float8_e4m3fn
        scale = case.keys.scale.squeeze(-1).contiguous()
        call = deep_gemm_scores(
            module, case.q.data.view(fp8), case.keys.data.view(fp8), scale, case.weights, case.visible
        )
        yield "deep_gemm", call
    if case.dtype == "bf16" and case.shape.rows >= 64 and not case.shape.distinct:
        block = max(1, (1 << 32) // (HEADS * case.shape.keys * 2))
        yield "torch.compile", compiled_scores(case.q, case.keys, case.weights, block=block)


def _peer_rows(case: Case, peers: Peers, selections: dict[str, Make], repeats: int) -> Iterator[Row]:
    """Score alone, then score with each selection; what fails or is wrong is noted and left out."""
    for name, score in _peer_scores(case, peers):
        try:
            scores = score()
            if (error := _far_off(case, scores)) > 0.1:
                raise BenchError(f"{name} is {error:.2g} standard deviations off at {case.shape.name}")
            times = time_gpu(score, repeats=repeats)
            yield _row("score", name, case.shape, case.dtype, times, _extra_mb(score, "cuda"), None)
        except Exception as error:
            peers.fail(f"{name} {case.shape.name}", error)
            continue
        for chosen, make in selections.items():
            try:
                select = make(scores)

                def both(score: Callable[[], "Tensor"] = score, select: Select = select) -> "Tensor":
                    return select(score())

                found = case.check(f"{name} + {chosen}", both(), 0.06)
                times = time_gpu(both, repeats=repeats)
            except Exception as error:
                peers.fail(f"{name} + {chosen} {case.shape.name}", error)
                continue
            extra = _extra_mb(both, "cuda")
            yield _row("score+select", f"{name} + {chosen}", case.shape, case.dtype, times, extra, found)


def score_rows(shape: Shape, dtype: str, device: str, peers: Peers) -> Iterator[Row]:
    from longrecall.kernels.indexer.topk import index_topk

    selections = peers.selections(K) if device == "cuda" else {}
    case = make_case(shape, dtype, device)
    # a CPU rounds dots to bf16 (2^-9), a tensor core sums fp8 products in 13 bits, fp32 sums differ in order
    tolerance = (0.05 if dtype != "fp32" else 1e-4) if device == "cpu" else {"fp8": 5e-3}.get(dtype, 1e-4)

    def ours() -> "Tensor":
        return index_topk(case.q, case.keys, case.weights, K, visible=case.visible)

    repeats = 30 if shape.rows * shape.keys <= 1 << 23 else 9
    for provider, call in (("longrecall", ours), ("torch", _torch_score_select(case))):
        found = case.check(provider, call(), tolerance if provider == "longrecall" else 0.06)
        quantiles = time_cpu(call) if device == "cpu" else time_gpu(call, repeats=repeats)
        yield _row("score+select", provider, shape, dtype, quantiles, _extra_mb(call, device), found)
    if device == "cuda":
        yield from _peer_rows(case, peers, selections, repeats)


def _row(
    op: str, provider: str, shape: Shape, dtype: str, times: tuple[float, float, float], extra: float | None,
    found: float | None,
) -> Row:  # fmt: skip
    return Row(
        op=op, provider=provider, shape=shape.name, dtype=dtype, unit="us", p20=times[0], p50=times[1], p80=times[2],
        extra_mb=extra, worst_tie=found,
    )  # fmt: skip


def select_rows(shape: Shape, device: str, peers: Peers) -> Iterator[Row]:
    import torch

    from longrecall.kernels.indexer.topk import select_topk

    others = peers.selections(K) if device == "cuda" else {"torch.topk": torch_topk(K)}
    scores = torch.randn(shape.rows, shape.keys, device=device)

    def ours(scores: "Tensor") -> "Tensor":
        if device == "cpu":
            return select_topk(scores, K)
        from longrecall.kernels.indexer.kernel import select_triton

        return select_triton(scores, K)

    makers: dict[str, Make] = {"longrecall": lambda _scores: ours}
    for provider, make in (makers | others).items():
        try:
            select = make(scores)
            if (found := worst_tie(select(scores)[:2], scores[:2], K)) > 0:
                raise BenchError(f"{provider} at {shape.name} does not select the {K} best scores")

            def call(select: Select = select) -> "Tensor":
                return select(scores)

            quantiles = time_cpu(call) if device == "cpu" else time_gpu(call, repeats=30)
        except Exception as error:
            if provider == "longrecall":
                raise
            peers.fail(f"{provider} {shape.name}", error)
            continue
        yield _row("select", provider, shape, "fp32", quantiles, _extra_mb(call, device), found)


def main() -> int:
    """Be ready, then wait for the case: what is imported beside another case costs the next one no time."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    else:
        early = Peers()  # the case's own peers find them loaded
        early.selections(K)
        early.load("deep_gemm", distribution="sgl-deep-gemm")
        importlib.import_module("longrecall.kernels.indexer.kernel")
    told = sys.stdin.readline()
    if not told.strip():
        return 0
    asked = json.loads(told)
    name, peers = CaseName.parse(asked["case"]), Peers()
    rows: list[Row] = []

    def tell() -> None:
        found = {
            "rows": [asdict(row) for row in rows], "peers": peers.versions, "left_out": peers.left_out,
            "machine": machine(options.device),
        }  # fmt: skip
        write_atomically(Path(asked["to"]), json.dumps(found).encode())

    if name.dtype is None:
        timed = select_rows(name.shape, options.device, peers)
    else:
        timed = score_rows(name.shape, name.dtype, options.device, peers)
    for row in timed:
        rows.append(row)
        tell()  # a peer that ends the process leaves what was measured before it
    tell()
    return 0


if __name__ == "__main__":
    sys.exit(main())
