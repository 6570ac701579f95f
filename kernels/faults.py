"""The fault catalogue: known ways for a served kernel to lose recall, each a switch with a predicted signature.

A fault is data: where it was seen in public, which arguments of its part's emulator switch it on, and what it should
do. The prediction is made from the mechanism alone; tests run the emulator and hold it to the prediction, so that a
verdict can name a cause by the signature it shows. Each part keeps its own entries in its `faults.py`.
"""

import importlib
import importlib.util
from dataclasses import dataclass, field
from typing import Literal

PARTS = ("indexer", "moe", "mhc", "sparse_attention")


class FaultError(ValueError):
    """A fault name or part that the catalogue does not hold."""


@dataclass(frozen=True, kw_only=True)
class Residue:
    """The fault acts only at prompt lengths that leave one of `values` modulo `modulus`."""

    modulus: int
    values: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What a replay at every length should show, before anything is measured."""

    below_onset: bool
    """Acts while every candidate is selected (top-k is the identity)."""
    selection: Literal["untouched", "slight", "partial", "chance"]
    """Beyond the onset, set recall against the healthy selection: 1, above .9, between, or k / candidates."""
    grows_with_length: bool
    """Beyond the onset, longer contexts lose more."""
    phases: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
    """Where it acts; one of them alone shows in the divergence of prefill and decode log-probabilities."""
    residue: Residue | None = None
    layers: Literal["all", "all but one", "some"] = "all"
    repeatable: bool = True
    """False: two runs of the same build on the same prompt differ."""
    in_indexer_topk: bool = False
    """Visible in a server's `return_indexer_topk`."""
    in_routed_experts: bool = False
    """Visible in a server's `return_routed_experts`."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    name: str
    part: str
    title: str
    """One line: what the broken kernel does."""
    sources: tuple[str, ...]
    """Public issues and pull requests, `owner/repo#number`."""
    signature: Signature
    switch: dict[str, object] = field(default_factory=dict)
    """Keyword arguments of the part's emulator that switch the fault on."""


def catalogue(part: str | None = None) -> tuple[Fault, ...]:
    """Every fault, or those of one part."""
    if part is not None and part not in PARTS:
        raise FaultError(f"part {part!r} is unknown; known: {', '.join(PARTS)}")
    faults: list[Fault] = []
    for name in PARTS if part is None else (part,):
        module = f"longrecall.kernels.{name}.faults"
        if importlib.util.find_spec(module) is not None:
            faults.extend(importlib.import_module(module).FAULTS)
    return tuple(faults)


def fault(name: str) -> Fault:
    """The fault of that name."""
    for candidate in catalogue():
        if candidate.name == name:
            return candidate
    raise FaultError(f"fault {name!r} is unknown; known: {', '.join(f.name for f in catalogue())}")
