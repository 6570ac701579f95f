"""Timing calls with a cold cache, and the two measured rates that a floor is made of."""

import statistics
import time
from collections.abc import Callable
from typing import Any


def percentiles(samples_ms: list[float]) -> dict[str, float]:
    """p20, p50 and p80 by rank."""
    ordered = sorted(samples_ms)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

    return {"p20_ms": at(0.2), "p50_ms": statistics.median(ordered), "p80_ms": at(0.8)}


class Clock:
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
        return percentiles(samples)


def ceilings(clock: Clock, device: str, dtype: Any) -> dict[str, float]:
    """Measured rates: a device copy counted read plus written, and a square matrix product of random data."""
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
