"""V4's index key compressor: one key per 4 tokens, from a window of 8 that overlaps the one before.

Every token projects to values and gates of 2 D channels; the first D serve the window *after* the token's own, the
last D its own. Key i is, per channel, the softmax-weighted mean of 8 slots: the first halves of window i-1 and the
second halves of window i (window -1 does not exist: its slots have gate -inf). Gates carry a learned offset per
position in the window. All fp32: "compression need fp32" (DeepSeek-V4 `Compressor`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

RATIO = 4


@dataclass(kw_only=True, eq=False)
class CompressorState:
    """What decode carries for one request and layer: two windows of values and gates, fp32 [2 * RATIO, 2 D].

    Rows 0..3 hold the last complete window, rows 4.. the tokens of the open one; unused rows have value 0, gate -inf.
    """

    values: Tensor
    gates: Tensor
    tokens: int = 0
    """Tokens seen; key i is complete once tokens >= RATIO * (i + 1)."""

    @classmethod
    def empty(cls, head_dim: int) -> "CompressorState":
        shape = (2 * RATIO, 2 * head_dim)
        return cls(values=torch.zeros(shape), gates=torch.full(shape, -torch.inf))

    def clone(self) -> "CompressorState":
        return CompressorState(values=self.values.clone(), gates=self.gates.clone(), tokens=self.tokens)


def _windows(values: Tensor, gates: Tensor) -> Tensor:
    """[W + 1, RATIO, 2 D] consecutive windows, the first one the predecessor → keys [W, D]."""
    dim = values.shape[-1] // 2
    slots = torch.cat((values[:-1, :, :dim], values[1:, :, dim:]), 1)  # [W, 8, D]
    weight = torch.cat((gates[:-1, :, :dim], gates[1:, :, dim:]), 1).softmax(1)
    return (slots * weight).sum(1)


def compress(state: CompressorState, values: Tensor, gates: Tensor, ape: Tensor, *, keep: int = RATIO) -> Tensor:
    """Take in tokens [n, 2 D] (a whole prompt, a chunk, or one token) and return the keys they complete, [m, D].

    ape: fp32 [RATIO, 2 D], added to the gates by position in the window. Any chunking gives the same keys.
    keep: leftover tokens of an unfinished window that are stored by a call of more than one token; less than
    RATIO - 1 is the tail fault: the tokens beyond are forgotten, and the key across the seam is wrong.
    """
    count = values.shape[0]
    position = torch.arange(state.tokens, state.tokens + count, device=values.device)
    values, gates = values.float(), gates.float() + ape.float()[position % RATIO]
    open_tokens = state.tokens % RATIO
    all_values = torch.cat((state.values[: RATIO + open_tokens], values))
    all_gates = torch.cat((state.gates[: RATIO + open_tokens], gates))
    windows = (open_tokens + count) // RATIO
    used = RATIO * (windows + 1)
    shape = (windows + 1, RATIO, values.shape[-1])
    keys = _windows(all_values[:used].view(shape), all_gates[:used].view(shape))
    left_values, left_gates = all_values[used:], all_gates[used:]
    if count > 1 and left_values.shape[0] > keep:
        left_values, left_gates = left_values[:keep], left_gates[:keep]
    state.values = torch.zeros_like(state.values)
    state.gates = torch.full_like(state.gates, -torch.inf)
    state.values[:RATIO] = all_values[used - RATIO : used]
    state.gates[:RATIO] = all_gates[used - RATIO : used]
    state.values[RATIO : RATIO + left_values.shape[0]] = left_values
    state.gates[RATIO : RATIO + left_gates.shape[0]] = left_gates
    state.tokens += count
    return keys
