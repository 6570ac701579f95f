import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.runners.reference.prefix_cache import PrefixCache, Tokens


@dataclass(eq=False)
class FakeCache:
    length: int
    nbytes: int = 1

    def fork(self, length: int) -> "FakeCache":
        return FakeCache(length)


def tokens(*values: int) -> Tokens:
    return np.array(values, dtype=np.int32)


def store(cache: PrefixCache, *values: int, salt: str = "", nbytes: int = 1, pinned: bool = False) -> FakeCache:
    stored = FakeCache(len(values), nbytes)
    cache.insert(tokens(*values), stored, salt=salt, pinned=pinned)
    return stored


sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=20)


@settings(max_examples=200)
@given(stored=sequences, query=st.lists(st.integers(0, 2), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_finds_the_longest_stored_prefix_after_any_inserts_and_removals(
    stored: list[list[int]], query: list[int], seed: int
) -> None:
    cache = PrefixCache(10**9)
    kept: dict[tuple[int, ...], FakeCache] = {}
    rng = random.Random(seed)
    for values in stored:
        fake = FakeCache(len(values))
        entry = cache.insert(tokens(*values), fake)
        assert entry is not None
        if rng.random() < 0.3:
            cache.remove(entry)
            kept.pop(tuple(values), None)
        else:
            kept[tuple(values)] = fake
    best = max((shared(query, list(values)) for values in kept), default=0)
    match = cache.match(tokens(*query))
    assert (match.length if match else 0) == best
    assert len(cache) == len(kept) and cache.nbytes == len(kept)
    if match:
        assert any(fake is match.cache and shared(query, list(values)) == best for values, fake in kept.items())


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_limit_bounds_the_match() -> None:
    cache = PrefixCache(100)
    store(cache, 1, 2, 3, 4)
    match = cache.match(tokens(1, 2, 3, 4), limit=3)
    assert match is not None and match.length == 3
    assert cache.match(tokens(1, 2), limit=0) is None


def test_salts_do_not_see_each_other() -> None:
    cache = PrefixCache(100)
    store(cache, 1, 2, 3, salt="a")
    assert cache.match(tokens(1, 2, 3), salt="b") is None
    assert cache.match(tokens(1, 2, 3)) is None
    assert cache.match(tokens(1, 2, 3), salt="a") is not None


def test_least_recently_used_goes_first() -> None:
    cache = PrefixCache(2)
    store(cache, 1, 1)
    store(cache, 2, 2)
    cache.match(tokens(1, 1))
    store(cache, 3, 3)
    assert cache.match(tokens(2, 2)) is None
    assert cache.match(tokens(1, 1)) is not None and cache.match(tokens(3, 3)) is not None
    assert cache.num_evicted == 1


def test_near_copies_go_before_older_sequences_of_their_own() -> None:
    cache = PrefixCache(3)
    store(cache, *range(100, 150))
    history = list(range(50))
    store(cache, *history, 60)
    store(cache, *history, 61)
    store(cache, *history, 62)
    assert cache.match(tokens(*range(100, 150))) is not None
    match = cache.match(tokens(*history, 63))
    assert match is not None and match.length == 50


def test_a_sequence_larger_than_the_bound_is_not_kept() -> None:
    cache = PrefixCache(10)
    assert cache.insert(tokens(1, 2), FakeCache(2, nbytes=11)) is None
    assert len(cache) == 0 and cache.nbytes == 0 and cache.match(tokens(1, 2)) is None


def test_running_sequences_are_neither_counted_nor_evicted() -> None:
    cache = PrefixCache(1)
    store(cache, 1, 2, 3, nbytes=50, pinned=True)
    store(cache, 4, 5, nbytes=50)
    assert cache.nbytes == 0 and len(cache) == 1
    assert cache.match(tokens(1, 2, 3)) is not None


def test_clear_forgets_all_salts_and_old_entries_can_still_be_removed() -> None:
    cache = PrefixCache(100)
    entry = cache.insert(tokens(1, 2), FakeCache(2))
    store(cache, 1, 2, salt="a")
    cache.clear()
    assert len(cache) == 0 and cache.match(tokens(1, 2), salt="a") is None
    assert entry is not None
    cache.remove(entry)
    assert cache.nbytes == 0


@pytest.mark.parametrize("depth", [3000])
def test_deep_chains_do_not_overflow_the_stack(depth: int) -> None:
    cache = PrefixCache(10**9)
    for size in range(1, depth, 3):
        store(cache, *([7] * size), 8)
    match = cache.match(tokens(*([7] * depth)))
    assert match is not None and match.length >= depth - 4
