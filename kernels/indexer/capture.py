"""Captured index activations: one safetensors file for a context, written by a model while it serves it.

    <layer>.q        [T, H, D]   after norm and rope, before the Hadamard rotation and quantisation
    <layer>.keys     [S, D]      the same point; S is the whole context
    <layer>.weights  [T, H]      scale folded in
    <layer>.attention [T, S]     optional: true attention mass, mean over heads
    positions        [T]         int32, token position of each captured query
    needles          [T, N]      optional int32: keys of the fact that each query asks for, -1 padded
    metadata         format version, preset, model, source (free text)

A capture is replayed through any `emulate.Pipeline`; that is how a format or fault is judged on real activations.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longrecall.kernels.indexer.emulate import Activations
from longrecall.kernels.indexer.presets import preset
from longrecall.kernels.indexer.rotation import hadamard

FORMAT_VERSION = "1"


class CaptureError(ValueError):
    """A capture file that cannot be written as asked or read back."""


@dataclass(kw_only=True, eq=False)
class CaptureWriter:
    """The hook: a model calls `add` once per layer and forward pass, the owner calls `close`.

    Queries arrive chunk by chunk and are kept while their position is in `wanted`. Nothing is written before `close`,
    which writes the file completely or not at all.
    """

    path: Path
    preset: str
    model: str = ""
    source: str = ""
    wanted: frozenset[int] | None = None
    """Token positions whose queries are kept; None: all (4 MB per 1000 queries of 8 heads and layer)."""
    _parts: dict[str, list[Tensor]] = field(default_factory=dict)
    _keys: dict[int, Tensor] = field(default_factory=dict)
    _positions: dict[int, list[Tensor]] = field(default_factory=dict)

    def add(self, layer: int, *, q: Tensor, keys: Tensor, weights: Tensor, positions: Tensor) -> None:
        """One pass of one layer: q [t, H, D] and weights [t, H] at positions [t]; keys [S, D] of the context so far."""
        positions = positions.detach().cpu().int()
        keep = torch.ones_like(positions, dtype=torch.bool)
        if self.wanted is not None:
            keep = torch.isin(positions, torch.tensor(sorted(self.wanted), dtype=positions.dtype))
        for name, value in (("q", q), ("weights", weights)):
            self._parts.setdefault(f"{layer}.{name}", []).append(value.detach().cpu()[keep])
        self._keys[layer] = keys.detach().to("cpu", copy=True)
        self._positions.setdefault(layer, []).append(positions[keep])

    def close(self, *, needles: Tensor | None = None, attention: dict[int, Tensor] | None = None) -> Path:
        """Write the file. needles [T, N] in the order of the captured queries."""
        from safetensors.torch import save_file

        if not self._parts:
            raise CaptureError(f"{self.path}: no layer was captured; did the model run with the hook in place?")
        positions = [torch.cat(parts) for parts in self._positions.values()]
        if any(not torch.equal(positions[0], other) for other in positions[1:]):
            raise CaptureError(f"{self.path}: the layers captured different query positions")
        tensors = {name: torch.cat(parts).contiguous() for name, parts in self._parts.items()}
        tensors |= {f"{layer}.keys": keys.contiguous() for layer, keys in self._keys.items()}
        tensors["positions"] = positions[0]
        if needles is not None:
            if needles.shape[0] != positions[0].shape[0]:
                raise CaptureError(f"{self.path}: {needles.shape[0]} rows of needles for {len(positions[0])} queries")
            tensors["needles"] = needles.int().contiguous()
        for layer, mass in (attention or {}).items():
            tensors[f"{layer}.attention"] = mass.contiguous()
        metadata = {"format": FORMAT_VERSION, "preset": self.preset, "model": self.model, "source": self.source}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(self.path.name + ".tmp")
        save_file(tensors, str(temporary), metadata=metadata)
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, self.path)
        return self.path


def attach(writer: CaptureWriter, indexers: Mapping[int, Any]) -> Callable[[], None]:
    """Capture every `select(q, keys, weights, visible)` of these layers' indexers; returns the function that detaches.

    Such an indexer holds rotated, rounded q and keys; the rotation is its own inverse and is undone here, the rounding
    (bf16 in the healthy reference build) stays in the capture.
    """

    def hook(layer: int, select: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def captured(q: Tensor, keys: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
            writer.add(layer, q=hadamard(q), keys=hadamard(keys), weights=weights, positions=visible - 1)
            return select(q, keys, weights, visible)

        return captured

    for layer, indexer in indexers.items():
        indexer.select = hook(layer, indexer.select)

    def detach() -> None:
        for indexer in indexers.values():
            del indexer.select  # the instance's; the class's comes back

    return detach


def read_capture(path: Path) -> Iterator[tuple[int, Activations]]:
    """(layer, activations) of each captured layer; the next layer's keys serve as the foreign ones."""
    from safetensors import safe_open

    if not path.is_file():
        raise CaptureError(f"{path}: no such capture file")
    with safe_open(str(path), framework="pt") as handle:
        metadata = handle.metadata() or {}
        if metadata.get("format") != FORMAT_VERSION:
            raise CaptureError(
                f"{path}: capture format {metadata.get('format')!r}, this version reads {FORMAT_VERSION}"
            )
        names = set(handle.keys())
        layers = sorted({int(name.split(".")[0]) for name in names if name.endswith(".q")})
        for i, layer in enumerate(layers):
            other = layers[(i + 1) % len(layers)]
            yield (
                layer,
                Activations(
                    preset=preset(metadata["preset"]),
                    q=handle.get_tensor(f"{layer}.q"),
                    keys=handle.get_tensor(f"{layer}.keys"),
                    weights=handle.get_tensor(f"{layer}.weights"),
                    positions=handle.get_tensor("positions").long(),
                    needles=handle.get_tensor("needles") if "needles" in names else None,
                    attention=handle.get_tensor(f"{layer}.attention") if f"{layer}.attention" in names else None,
                    foreign_keys=handle.get_tensor(f"{other}.keys") if len(layers) > 1 else None,
                ),
            )
