"""How far each precision of the hyper-connections drifts from fp64 through L layers.

The sub-layers are fixed random maps behind an RMS norm, the same for every precision and evaluated in fp64, so that
what differs is the hyper-connection alone. `streams_bf16` also rounds the streams between layers, as serving does:
the drift that this brings in fp32 mixing is the floor under which a precision does not matter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longrecall.kernels.mhc.mixing import PRECISIONS, Precision, mhc_post, mhc_pre


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Relative error of the streams against fp64 after each layer."""

    precision: Precision
    streams_bf16: bool
    per_layer: tuple[float, ...]
    """‖R - R64‖ / ‖R64‖ after layers 1..L (two sites each)."""

    @property
    def final(self) -> float:
        return self.per_layer[-1]


def _sublayer(u: Tensor, weight: Tensor) -> Tensor:
    u = u.double()
    return torch.tanh(u * u.square().mean(-1, keepdim=True).add(1e-6).rsqrt() @ weight)


def drift_through_layers(
    *,
    layers: int,
    hidden: int,
    tokens: int,
    generator: torch.Generator,
    n_streams: int = 4,
    scale: float = 1.0,
    fn_std: float = 0.02,
    precisions: tuple[Precision, ...] = PRECISIONS[1:],
    streams_bf16: bool = True,
) -> list[Drift]:
    """Run `layers` layers (two sites each) from one embedding copied into the streams; one `Drift` per precision.

    `scale` and `fn_std` set how strongly the mixes depend on the token: m has standard deviation fn_std sqrt(n hidden).
    """
    rows = 2 * n_streams + n_streams**2

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sites = [
        (
            (normal(rows, n_streams * hidden) * fn_std).float(),
            normal(rows).float(),
            normal(hidden, hidden) * hidden**-0.5,
        )
        for _ in range(2 * layers)
    ]
    scales = torch.full((3,), scale)
    start = normal(tokens, hidden).bfloat16()[:, None].expand(tokens, n_streams, hidden)

    def run(precision: Precision, rounded: bool) -> list[Tensor]:
        streams = start.to(torch.float64 if precision == "fp64" else torch.bfloat16 if rounded else torch.float32)
        after = []
        for site, (fn, base, weight) in enumerate(sites):
            u, post, comb = mhc_pre(streams, fn, scales, base, precision=precision)
            streams = mhc_post(streams, _sublayer(u, weight).to(streams.dtype), post, comb)
            if site % 2:
                after.append(streams.double())
        return after

    exact = run("fp64", False)

    def error(got: Tensor, want: Tensor) -> float:
        return float((got - want).norm() / want.norm())

    return [
        Drift(
            precision=precision,
            streams_bf16=streams_bf16,
            per_layer=tuple(error(g, w) for g, w in zip(run(precision, streams_bf16), exact, strict=True)),
        )
        for precision in precisions
    ]
