"""`scale_exponent`: how often a layer applied the routed scaling factor, from its outputs alone.

A layer's output is out = a routed + b shared, with a = factor^n_routed and b = factor^n_shared. `routed` and `shared`
are recomputed in fp64 from the checkpoint's weights without any factor (`MoeLayer.parts`); per token a least-squares
fit over the channels gives a and b, and the medians over tokens give the exponents. Medians, because a token whose
expert flipped at a near tie, or one outlier channel of a 4-bit expert, says nothing about the factor; quantisation
noise in the layer enters the fitted side mostly, but rounding to few bits also shrinks weights, and noise in the
reference shrinks the slope: both move it by about the squared noise share of the part, which the error bar therefore
includes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from longrecall.kernels.moe.layer import Parts

Reading = Literal["never", "once", "twice", "mixed", "other", "cannot tell"]


class ProbedLayer(Protocol):
    """What the probe needs of a layer: `factor`, its output, and its parts before any factor."""

    @property
    def factor(self) -> float: ...
    def __call__(self, x: Tensor, token_ids: Tensor | None = None, /) -> Tensor: ...
    def parts(self, x: Tensor, token_ids: Tensor | None = None, /) -> Parts: ...


@dataclass(frozen=True, kw_only=True)
class Exponent:
    """n in factor^n with its error bar; None where it cannot be measured."""

    value: float | None
    stderr: float | None
    """Statistical (of the median over tokens, 1.2533 x 1.4826 MAD / sqrt(tokens), or the fits' own error where larger)
    and systematic (the squared noise share of the part, in units of ln factor), added in quadrature."""
    spread: float | None
    """1.4826 MAD of the tokens' own exponents: large when the tokens of one layer disagree."""
    reading: Reading
    reason: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.reading} ({self.reason})"
        return f"{self.value:.3f} ± {self.stderr:.3f}: {self.reading}"


@dataclass(frozen=True, kw_only=True)
class LayerExponent:
    """The two exponents of one layer, or of several ("mixed" when they differ)."""

    routed: Exponent
    """1 when right."""
    shared: Exponent
    """0 when right; "cannot tell" without a shared expert or when it is parallel to the routed sum."""
    relative: Exponent
    """Of routed over shared, 1 when right: all that a norm behind the layer lets through."""
    residual: float
    """‖out - a routed - b shared‖ / ‖out‖, median over tokens: quantisation noise, or a fault of another kind."""
    n_tokens: int
    layers: tuple[tuple[str, "LayerExponent"], ...] = ()
    """Of several layers, each by name."""


def read_exponent(value: float, stderr: float) -> Reading:
    """never, once or twice when 0, 1 or 2 is within max(0.1, 3 stderr); "cannot tell" when the bar spans a half."""
    if 3 * stderr > 0.5:
        return "cannot tell"
    names: dict[int, Reading] = {0: "never", 1: "once", 2: "twice"}
    nearest = round(value)
    return names.get(nearest, "other") if abs(value - nearest) <= max(0.1, 3 * stderr) else "other"


def _unknown(reason: str) -> Exponent:
    return Exponent(value=None, stderr=None, spread=None, reading="cannot tell", reason=reason)


def _exponent(slopes: Tensor, slope_errors: Tensor, noise_share: Tensor, factor: float) -> Exponent:
    """From per-token slopes factor^n [T], their fit errors, and the residual's size relative to the part."""
    good = slopes.isfinite() & (slopes > 0) & (slope_errors < slopes)
    if int(good.sum()) < max(3, slopes.numel() // 2):
        return _unknown("the part is too small, or too parallel to the other, to be told from noise")
    log_factor = abs(math.log(factor))
    n = slopes[good].log() / math.log(factor)
    value = float(n.median())
    spread = 1.4826 * float((n - value).abs().median())
    count = math.sqrt(int(good.sum()))
    fit = float((slope_errors[good] / slopes[good]).median()) / log_factor / count
    systematic = float(noise_share[good].median()) ** 2 / log_factor
    stderr = math.hypot(max(1.2533 * spread / count, fit, 1e-6), systematic)
    reading = read_exponent(value, stderr)
    reason = "the error bar spans half an exponent" if reading == "cannot tell" else ""
    if float(((n - value).abs() > 0.5).double().mean()) > 0.2:
        reading, reason = "mixed", "tokens of one layer disagree"
    return Exponent(value=value, stderr=stderr, spread=spread, reading=reading, reason=reason)


def fit_parts(out: Tensor, parts: Parts, factor: float) -> LayerExponent:
    """Exponents of one layer from its output [T, C] and its parts; fits in fp64 over the channels, token by token."""
    if factor <= 0:
        raise ValueError(f"the routed scaling factor is {factor}; it must be positive")
    y, r = out.double(), parts.routed.double()
    if y.shape != r.shape:
        raise ValueError(f"out has shape {list(y.shape)}, the routed part {list(r.shape)}")
    T, C = y.shape
    if T < 4:
        raise ValueError(f"{T} tokens are too few for an error bar; at least 4")
    columns = [r] if parts.shared is None else [r, parts.shared.double()]
    basis = torch.stack(columns, -1)  # [T, C, 1 or 2]
    gram = basis.transpose(1, 2) @ basis
    # parallel parts make the system singular: the pseudo-inverse keeps it finite and the error bar tells
    inverse = torch.linalg.pinv(gram, hermitian=True, rtol=1e-12)
    slopes = (inverse @ (basis.transpose(1, 2) @ y[..., None])).squeeze(-1)  # [T, parts]
    left = y - (basis @ slopes[..., None]).squeeze(-1)
    noise = left.square().sum(-1) / max(C - len(columns), 1)
    errors = (noise[:, None] * inverse.diagonal(dim1=1, dim2=2)).clamp_min(0).sqrt()
    if len(columns) == 2:
        # within 1e-9 of parallel the split between the two is rounding, not evidence
        cosine = gram[:, 0, 1].abs() / (gram[:, 0, 0] * gram[:, 1, 1]).sqrt()
        errors[cosine > 1 - 1e-9] = math.inf
    residual = float((left.norm(dim=-1) / y.norm(dim=-1).clamp_min(1e-300)).median())
    if factor == 1.0:
        nothing = _unknown("the factor is 1: every power of it is the same")
        return LayerExponent(routed=nothing, shared=nothing, relative=nothing, residual=residual, n_tokens=T)
    shares = left.norm(dim=-1)[:, None] / (slopes.abs() * basis.norm(dim=1)).clamp_min(1e-300)  # [T, parts]
    found = [_exponent(slopes[:, i], errors[:, i], shares[:, i], factor) for i in range(len(columns))]
    routed = found[0]
    shared = relative = _unknown("no shared expert")
    if len(found) == 2:
        shared = found[1]
        ratio = slopes[:, 0] / slopes[:, 1]
        ratio_error = ratio.abs() * (errors / slopes).square().sum(-1).sqrt()
        relative = _exponent(ratio, ratio_error, shares.square().sum(-1).sqrt(), factor)
    return LayerExponent(routed=routed, shared=shared, relative=relative, residual=residual, n_tokens=T)


def _together(exponents: Sequence[Exponent]) -> Exponent:
    """One exponent of several layers: the inverse-variance mean when they agree, "mixed" when they do not."""
    known = [e for e in exponents if e.value is not None and e.stderr is not None]
    if not known:
        return exponents[0] if exponents else _unknown("no layers")
    values = torch.tensor([e.value for e in known], dtype=torch.float64)
    stderrs = torch.tensor([e.stderr for e in known], dtype=torch.float64)
    weights = stderrs.pow(-2)
    value = float((weights * values).sum() / weights.sum())
    spread = float(values.max() - values.min())
    # layers differ by real amounts, not by rounding: a bar of rounding size must not turn 1.000 and 1.001 into "mixed"
    if spread > max(0.2, 6 * float(stderrs.max())) or any(e.reading == "mixed" for e in known):
        by_value = ", ".join(f"{v:.2f}" for v in sorted({round(float(v), 2) for v in values}))
        return Exponent(
            value=float(values.mean()),
            stderr=float(values.std(unbiased=True) / math.sqrt(len(known))) if len(known) > 1 else known[0].stderr,
            spread=spread,
            reading="mixed",
            reason=f"layers differ: {by_value}",
        )
    stderr = max(float(weights.sum()) ** -0.5, float(stderrs.min()) / math.sqrt(len(known)))
    return Exponent(value=value, stderr=stderr, spread=spread, reading=read_exponent(value, stderr))


def combine_layers(layers: Mapping[str, LayerExponent] | Iterable[tuple[str, LayerExponent]]) -> LayerExponent:
    """One statement about several layers, keeping each."""
    named = tuple(layers.items() if isinstance(layers, Mapping) else layers)
    if not named:
        raise ValueError("no layers to combine")
    return LayerExponent(
        routed=_together([e.routed for _, e in named]),
        shared=_together([e.shared for _, e in named]),
        relative=_together([e.relative for _, e in named]),
        residual=max(e.residual for _, e in named),
        n_tokens=sum(e.n_tokens for _, e in named),
        layers=named,
    )


def scale_exponent(
    layer: ProbedLayer | Sequence[ProbedLayer] | Mapping[str, ProbedLayer],
    x: Tensor,
    token_ids: Tensor | None = None,
    *,
    reference: ProbedLayer | Sequence[ProbedLayer] | Mapping[str, ProbedLayer] | None = None,
) -> LayerExponent:
    """Measure n in factor^n on probes x [T, C]: separately for the routed and the shared part, with error bars.

    Several layers (a sequence or a mapping) give one statement, "mixed" when they differ. `reference` (same form)
    supplies the parts when the probed layer's own weights are not at hand, e.g. the unquantised checkpoint of a 4-bit
    build.
    """
    if isinstance(layer, Mapping):
        if reference is not None and not isinstance(reference, Mapping):
            raise ValueError("layers given by name need a reference by the same names")
        return combine_layers(
            (name, scale_exponent(one, x, token_ids, reference=reference[name] if reference is not None else None))
            for name, one in layer.items()
        )
    if isinstance(layer, Sequence):
        if reference is not None and not isinstance(reference, Sequence):
            raise ValueError("a sequence of layers needs a sequence of references")
        return combine_layers(
            (str(i), scale_exponent(one, x, token_ids, reference=reference[i] if reference is not None else None))
            for i, one in enumerate(layer)
        )
    source = layer if reference is None else reference
    if isinstance(source, Sequence | Mapping):
        raise ValueError("one layer needs one reference")
    return fit_parts(layer(x, token_ids), source.parts(x, token_ids), layer.factor)
