import pytest
import torch

from longrecall.kernels.indexer.compressor import RATIO, CompressorState, compress

DIM = 16


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, 2 * DIM, generator=g) for n in (count, count, RATIO))  # type: ignore[return-value]


def by_the_formula(values: torch.Tensor, gates: torch.Tensor, ape: torch.Tensor) -> torch.Tensor:
    """One key at a time, from the definition, fp64."""
    values, gates = values.double(), gates.double() + ape.double()[torch.arange(len(values)) % RATIO]
    keys = []
    for i in range(len(values) // RATIO):
        slots = [(values[t, DIM:], gates[t, DIM:]) for t in range(RATIO * i, RATIO * (i + 1))]
        if i:
            slots += [(values[t, :DIM], gates[t, :DIM]) for t in range(RATIO * (i - 1), RATIO * i)]
        weight = torch.stack([gate for _, gate in slots]).softmax(0)
        keys.append((torch.stack([value for value, _ in slots]) * weight).sum(0))
    return torch.stack(keys) if keys else torch.zeros(0, DIM, dtype=torch.float64)


@pytest.mark.parametrize("count", [1, 3, 4, 7, 8, 33])
def test_a_whole_prompt_gives_the_keys_of_the_formula(count: int) -> None:
    values, gates, ape = tokens(count)
    got = compress(CompressorState.empty(DIM), values, gates, ape)
    assert got.shape == (count // RATIO, DIM)
    torch.testing.assert_close(got.double(), by_the_formula(values, gates, ape), rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunks", [[1] * 21, [5, 1, 1, 1, 13], [3, 3, 3, 3, 3, 3, 3], [20, 1]])
def test_any_chunking_gives_the_same_keys(chunks: list[int]) -> None:
    values, gates, ape = tokens(21)
    whole = compress(CompressorState.empty(DIM), values, gates, ape)
    state, parts, start = CompressorState.empty(DIM), [], 0
    for size in chunks:
        parts.append(compress(state, values[start : start + size], gates[start : start + size], ape))
        start += size
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-6)
    assert state.tokens == 21


def test_a_cloned_state_is_independent() -> None:
    values, gates, ape = tokens(9)
    state = CompressorState.empty(DIM)
    compress(state, values[:6], gates[:6], ape)
    copy = state.clone()
    compress(state, values[6:], gates[6:], ape)
    assert copy.tokens == 6
    torch.testing.assert_close(
        compress(copy, values[6:], gates[6:], ape), compress(CompressorState.empty(DIM), values, gates, ape)[1:]
    )
