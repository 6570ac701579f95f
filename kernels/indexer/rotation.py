"""Rotations of the indexer's queries and keys: the Hadamard transform and the rope variants of each model."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=4)
def _hadamard_matrix(order: int, device: str) -> Tensor:
    """Sylvester's matrix times order^-0.5, fp32: orthogonal and symmetric, so it is its own inverse."""
    if order < 1 or order & (order - 1):
        raise ValueError(f"a Sylvester Hadamard matrix has an order that is a power of two, not {order}")
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < order:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return (matrix * order**-0.5).to(device)


def hadamard(x: Tensor) -> Tensor:
    """x [..., D] times the Sylvester Hadamard matrix of order D (a power of two; 128 in the indexer), times D^-0.5.

    Computed in fp32, returned in x's dtype. Scores do not change when both sides are rotated; one side alone sends
    the selection to chance.
    """
    return (x.float() @ _hadamard_matrix(x.shape[-1], str(x.device))).to(x.dtype)
