"""Muon: momentum, its matrices orthogonalised before they are applied.

Source: Keller Jordan, https://kellerjordan.github.io/posts/muon/.
For the hidden matrices; embeddings, head, norms, gates and biases stay with AdamW. Stacks of matrices [E, R, C] are
orthogonalised one by one.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def orthogonalised(update: Tensor, steps: int = 5) -> Tensor:
    """[…, R, C] with singular values near 1, by Newton-Schulz in bf16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for value in group["params"]:
                if value.grad is not None:
                    by_shape.setdefault(value.shape, []).append(value)
            for shape, values in by_shape.items():
                updates = []
                for value in values:
                    state, grad = self.state[value], value.grad
                    assert grad is not None
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(value)
                    state["momentum"].lerp_(grad, 1 - group["momentum"])
                    updates.append(grad.lerp(state["momentum"], group["momentum"]))
                # One lr for all shapes: a step changes each output by about the same amount.
                scale = max(1.0, shape[-2] / shape[-1]) ** 0.5 * group["lr"]
                for value, made in zip(values, orthogonalised(torch.stack(updates)), strict=True):
                    value.mul_(1 - group["lr"] * group["weight_decay"])
                    value.add_(made.to(value.dtype), alpha=-scale)
