import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from longrecall.runners.reference import engine as module
from longrecall.runners.reference.engine import Engine, Settings
from longrecall.runners.reference.interface import Chunk
from longrecall.runners.reference.request import EngineStoppedError, Progress, QueueFullError, Request
from longrecall.runners.reference.sampling import Sampling
from longrecall.runners.reference.tokenizer import TextTokenizer

# Logprobs of one prompt served alone, packed, from the cache or in chunks: fp32 GEMMs of other shapes round otherwise.
# Largest difference seen 4e-6.
TOLERANCE = 5e-5
WAIT_S = 30


class Asked:
    """A submitted request, to be waited for."""

    def __init__(self, engine: Engine, token_ids: list[int], **fields: Any) -> None:
        sampling = fields.pop("sampling", None) or Sampling(
            temperature=0.0, max_tokens=fields.pop("max_tokens", 8), ignore_eos=True
        )
        self.progress: list[Progress] = []
        self._done = threading.Event()
        self.request = Request(token_ids=token_ids, sampling=sampling, sink=self._sink, **fields)
        engine.submit(self.request)

    def _sink(self, progress: Progress) -> None:
        self.progress.append(progress)
        if progress.finished:
            self._done.set()

    def result(self) -> Request:
        assert self._done.wait(WAIT_S), "the engine gave no answer"
        if (error := self.progress[-1].error) is not None:
            raise error
        return self.request


@pytest.fixture
def make_engine(tiny_model: Any, small_tokenizer: TextTokenizer) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        engine = Engine(tiny_model, small_tokenizer, Settings(**settings))
        engine.start()
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.stop()
        assert not engine.alive


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [2, *(rng.randrange(263, 370) for _ in range(length - 1))]


def ask(engine: Engine, token_ids: list[int], **fields: Any) -> Request:
    return Asked(engine, token_ids, **fields).result()


def assert_same(a: Request, b: Request) -> None:
    assert a.output_ids == b.output_ids
    for x, y in zip(a.output_logprobs + a.prompt_logprobs, b.output_logprobs + b.prompt_logprobs, strict=True):
        assert x.token_id == y.token_id
        assert x.logprob == pytest.approx(y.logprob, abs=TOLERANCE)


def without_engine(model: Any, token_ids: list[int], steps: int) -> tuple[list[int], list[float]]:
    """Greedy continuation by recomputing everything at each step."""
    ids, logprobs = list(token_ids), []
    for _ in range(steps):
        (logits,) = model.prefill([Chunk(tokens=ids, cache=model.new_cache(), logits="last")])
        row = torch.log_softmax(logits[-1], dim=-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row[ids[-1]]))
    return ids[len(token_ids) :], logprobs


def test_greedy_continuation_and_logprobs_are_those_of_the_model(make_engine: Any, tiny_model: Any) -> None:
    expected_ids, expected_logprobs = without_engine(tiny_model, prompt(0, 40), 8)
    request = ask(make_engine(), prompt(0, 40), top_logprobs=3)
    assert request.output_ids == expected_ids
    assert request.finish_reason == "length"
    assert [t.logprob for t in request.output_logprobs] == pytest.approx(expected_logprobs, abs=TOLERANCE)
    for token in request.output_logprobs:
        assert len(token.top) == 3 and token.top[0][0] == token.token_id
        assert [p for _, p in token.top] == sorted((p for _, p in token.top), reverse=True)


def test_cached_and_uncached_answers_agree(make_engine: Any) -> None:
    cold = ask(make_engine(prefix_cache_bytes=0), prompt(1, 60), top_logprobs=0)
    engine = make_engine()
    first = ask(engine, prompt(1, 60), top_logprobs=0)
    again = ask(engine, prompt(1, 60), top_logprobs=0)
    branch = ask(engine, [*prompt(1, 60)[:50], *prompt(2, 10)], top_logprobs=0)
    assert [r.cached_tokens for r in (cold, first, again, branch)] == [0, 0, 59, 50]
    assert_same(cold, first)
    assert_same(cold, again)
    assert_same(branch, ask(make_engine(prefix_cache_bytes=0), branch.token_ids, top_logprobs=0))


def test_generated_tokens_are_reused_by_the_next_turn(make_engine: Any) -> None:
    engine = make_engine()
    first = ask(engine, prompt(3, 30), max_tokens=5)
    history = [*first.token_ids, *first.output_ids]
    following = ask(engine, [*history, *prompt(4, 6)])
    assert following.cached_tokens == len(history) - 1  # the token sampled last was never fed to the model
    assert_same(following, ask(make_engine(prefix_cache_bytes=0), following.token_ids))


def test_requests_served_together_answer_as_when_served_alone(make_engine: Any, tiny_model: Any) -> None:
    prompts = [prompt(i, 5 + 7 * i) for i in range(12)]
    alone = make_engine(prefix_cache_bytes=0, max_running_requests=1, batch_window_s=0.0)
    expected = [ask(alone, p, top_logprobs=2, max_tokens=4 + i) for i, p in enumerate(prompts)]
    tiny_model.calls.clear()
    together = make_engine(batch_window_s=0.2, max_batch_window_s=1.0)
    asked = [Asked(together, p, top_logprobs=2, max_tokens=4 + i) for i, p in enumerate(prompts)]
    for a, b in zip(expected, asked, strict=True):
        assert_same(a, b.result())
    assert max(len(sizes) for kind, sizes in tiny_model.calls if kind == "decode") == 12
    assert together.counters.prefill_calls <= 2


@hypothesis_settings(max_examples=25)
@given(
    chunk=st.integers(1, 50),
    running=st.integers(1, 5),
    cache_bytes=st.sampled_from([0, 20_000, 2**20]),
    cuts=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 70), st.integers(0, 3)), min_size=1, max_size=6),
)
def test_no_schedule_changes_an_answer(
    tiny_model_shared: Any,
    small_tokenizer: TextTokenizer,
    chunk: int,
    running: int,
    cache_bytes: int,
    cuts: list[tuple[int, int, int]],
) -> None:
    """Any chunk size, concurrency and cache bound, on prompts that share prefixes of each other."""
    engine = Engine(
        tiny_model_shared,
        small_tokenizer,
        Settings(
            chunked_prefill_size=chunk,
            max_running_requests=running,
            prefix_cache_bytes=cache_bytes,
            batch_window_s=0.002,
        ),
    )
    engine.start()
    try:
        asked = [
            Asked(
                engine,
                [*prompt(seed, 80)[:cut], *prompt(9, 4)[1:]],
                max_tokens=new,
                top_logprobs=0,
                prompt_logprob_start=cut,
            )
            for seed, cut, new in cuts
        ]
        for one in asked:
            request = one.result()
            ids, logprobs = without_engine(tiny_model_shared, request.token_ids, request.sampling.max_tokens)
            assert request.output_ids == ids
            assert [t.logprob for t in request.output_logprobs] == pytest.approx(logprobs, abs=TOLERANCE)
            assert len(request.prompt_logprobs) == 3
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def tiny_model_shared(small_tokenizer: TextTokenizer, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("tiny_model_class")(small_tokenizer.vocab_size)


def test_prompts_sharing_a_prefix_compute_it_once(make_engine: Any, tiny_model: Any) -> None:
    history = prompt(5, 200)
    engine = make_engine(batch_window_s=0.2, max_batch_window_s=1.0)
    asked = [Asked(engine, [*history, *prompt(10 + i, 12)[1:]]) for i in range(8)]
    results = [one.result() for one in asked]
    assert sorted(r.cached_tokens for r in results) == [0, *[200] * 7]
    assert engine.counters.prefill_tokens == 200 + 8 * 11
    assert max(len(sizes) for kind, sizes in tiny_model.calls if kind == "decode") == 8


def test_a_short_common_beginning_is_not_worth_waiting_for(make_engine: Any) -> None:
    engine = make_engine(batch_window_s=0.2, max_batch_window_s=1.0)
    begin = prompt(5, 40)
    for one in [Asked(engine, [*begin, *prompt(10 + i, 300)[1:]]) for i in range(4)]:
        assert one.result().cached_tokens == 0
    assert engine.counters.prefill_calls == 1


def test_the_same_set_of_requests_makes_the_same_batches(make_engine: Any, tiny_model: Any) -> None:
    prompts = [prompt(i, 9 + 5 * i) for i in range(8)]
    seen = []
    for seed in range(3):
        engine = make_engine(batch_window_s=0.2, max_batch_window_s=2.0, chunked_prefill_size=64)
        shuffled = random.Random(seed).sample(prompts, len(prompts))
        tiny_model.calls.clear()
        for one in [Asked(engine, p) for p in shuffled]:
            one.result()
        seen.append(list(tiny_model.calls))
    assert seen[0] == seen[1] == seen[2]


def test_salted_requests_share_nothing(make_engine: Any) -> None:
    engine = make_engine()
    assert ask(engine, prompt(6, 50), cache_salt="a").cached_tokens == 0
    assert ask(engine, prompt(6, 50), cache_salt="b").cached_tokens == 0
    assert ask(engine, prompt(6, 50)).cached_tokens == 0
    assert ask(engine, prompt(6, 50), cache_salt="a").cached_tokens == 49


def test_long_prompts_are_prefilled_in_chunks(make_engine: Any, tiny_model: Any) -> None:
    whole = ask(make_engine(), prompt(7, 100), top_logprobs=0)
    tiny_model.calls.clear()
    chunked = ask(make_engine(chunked_prefill_size=32), prompt(7, 100), top_logprobs=0)
    assert [sizes for kind, sizes in tiny_model.calls if kind == "prefill"] == [[32], [32], [32], [4]]
    assert_same(whole, chunked)


def test_forced_logprobs_are_those_of_the_model(make_engine: Any, tiny_model: Any) -> None:
    ids = prompt(8, 300)
    (logits,) = tiny_model.prefill([Chunk(tokens=ids, cache=tiny_model.new_cache(), logits="all")])
    expected = torch.log_softmax(logits, dim=-1)[torch.arange(299), torch.tensor(ids[1:])].tolist()
    engine = make_engine()
    request = ask(engine, ids, prompt_logprob_start=0, top_logprobs=2, max_tokens=0)
    assert request.prompt_logprobs[0] == (2, None, ())
    assert [t.token_id for t in request.prompt_logprobs] == ids
    assert [t.logprob for t in request.prompt_logprobs[1:]] == pytest.approx(expected, abs=TOLERANCE)
    assert request.output_ids == [] and request.finish_reason == "length"
    tail = ask(engine, ids, prompt_logprob_start=294, max_tokens=1)
    assert tail.cached_tokens == 293
    assert [t.logprob for t in tail.prompt_logprobs] == pytest.approx(expected[293:], abs=TOLERANCE)
    assert len(tail.output_ids) == 1


def test_a_stop_string_ends_the_text_before_it_and_never_leaks_into_the_stream(
    make_engine: Any, small_tokenizer: TextTokenizer
) -> None:
    engine = make_engine()
    free = ask(engine, prompt(9, 30), max_tokens=30)
    for start in range(3, 12):
        stop = free.text[start : start + 4]
        asked = Asked(
            engine,
            prompt(9, 30),
            sampling=Sampling(temperature=0.0, max_tokens=30, stop=("~~~~~~", stop), ignore_eos=True),
        )
        request = asked.result()
        assert request.finish_reason == "stop" and request.matched_stop == stop
        assert request.text == free.text[: free.text.index(stop)]
        assert "".join(p.text for p in asked.progress) == request.text


def test_eos_ends_and_is_not_part_of_the_text(make_engine: Any, tiny_model: Any) -> None:
    tiny_model.head[:, 1] = 0.0
    free = ask(make_engine(), prompt(11, 20), max_tokens=6)
    engine = make_engine()
    third = free.output_ids[2]
    request = ask(engine, prompt(11, 20), sampling=Sampling(temperature=0.0, max_tokens=6, stop_token_ids=(third,)))
    first_at = free.output_ids.index(third)
    assert request.output_ids == free.output_ids[: first_at + 1]
    assert (request.finish_reason, request.matched_stop) == ("stop", third)
    assert request.text == engine.tokenizer.decode(free.output_ids[:first_at])


def test_sampling_repeats_with_its_seed_and_follows_the_distribution(make_engine: Any, tiny_model: Any) -> None:
    engine = make_engine()

    def draw(seed: int, **sampling: Any) -> list[int]:
        return ask(
            engine, prompt(12, 9), sampling=Sampling(max_tokens=1, seed=seed, ignore_eos=True, **sampling)
        ).output_ids

    assert draw(5) == draw(5)
    (logits,) = tiny_model.prefill([Chunk(tokens=prompt(12, 9), cache=tiny_model.new_cache(), logits="last")])
    probabilities = torch.softmax(logits[-1], dim=-1)
    best = int(probabilities.argmax())
    drawn = [draw(seed)[0] for seed in range(300)]
    p = float(probabilities[best])
    assert abs(drawn.count(best) / 300 - p) < 4 * (p * (1 - p) / 300) ** 0.5
    assert {draw(seed, top_k=1)[0] for seed in range(5)} == {best}
    assert {draw(seed, top_p=1e-6)[0] for seed in range(5)} == {best}
    allowed = set(probabilities.topk(3).indices.tolist())
    assert {draw(seed, top_k=3)[0] for seed in range(30)} <= allowed


class Gate:
    """Holds the model before a call until opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT_S)


def test_a_cancelled_request_stops_and_the_others_go_on(make_engine: Any, tiny_model: Any) -> None:
    engine = make_engine(batch_window_s=0.1, max_batch_window_s=1.0)
    gate = Gate()
    tiny_model.before_call = gate
    dropped = Asked(engine, prompt(13, 20), max_tokens=1000)
    kept = Asked(engine, prompt(14, 20), max_tokens=5)
    assert gate.reached.wait(WAIT_S)
    dropped.request.cancelled = True
    gate.opened.set()
    assert len(kept.result().output_ids) == 5
    assert dropped.result().finish_reason == "abort"
    assert len(dropped.request.output_ids) <= 1
    assert engine.counters.aborted == 1 and engine.num_requests == 0


def test_a_full_queue_refuses(make_engine: Any, tiny_model: Any) -> None:
    engine = make_engine(max_queued_requests=2, max_running_requests=1)
    gate = Gate()
    tiny_model.before_call = gate
    asked = [Asked(engine, prompt(i, 10)) for i in range(3)]
    with pytest.raises(QueueFullError, match="3 requests"):
        Asked(engine, prompt(99, 10))
    gate.opened.set()
    for one in asked:
        one.result()


def test_flush_empties_the_cache_and_refuses_while_busy(make_engine: Any, tiny_model: Any) -> None:
    engine = make_engine()
    ask(engine, prompt(15, 30))

    def flush() -> bool:
        answers: list[bool] = []
        done = threading.Event()
        engine.flush_cache(lambda ok: (answers.append(ok), done.set()))  # type: ignore[func-returns-value]
        gate.opened.set()
        assert done.wait(WAIT_S)
        return answers[0]

    gate = Gate()
    assert flush()
    assert ask(engine, prompt(15, 30)).cached_tokens == 0
    gate = Gate()
    tiny_model.before_call = gate
    busy = Asked(engine, prompt(16, 10))
    assert gate.reached.wait(WAIT_S)
    assert not flush()
    busy.result()


def test_memory_bound_limits_concurrency_not_correctness(make_engine: Any, tiny_model: Any) -> None:
    engine = make_engine(max_total_tokens=60, batch_window_s=0.1, max_batch_window_s=1.0)
    asked = [Asked(engine, prompt(20 + i, 20), max_tokens=8) for i in range(6)]
    for one in asked:
        assert len(one.result().output_ids) == 8
    assert max(len(sizes) for kind, sizes in tiny_model.calls if kind == "decode") == 2


def test_a_failing_model_fails_its_requests_and_serves_the_next(make_engine: Any, tiny_model: Any) -> None:
    engine = make_engine()

    def fail() -> None:
        tiny_model.before_call = lambda: None
        raise RuntimeError("out of memory, say")

    tiny_model.before_call = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        ask(engine, prompt(30, 20))
    again = ask(engine, prompt(30, 20))
    assert again.cached_tokens == 0 and len(again.output_ids) == 8


def test_logits_that_are_not_numbers_are_an_error_not_a_token(make_engine: Any, tiny_model: Any) -> None:
    engine = make_engine()
    tiny_model.head[3, 7] = torch.nan
    with pytest.raises(ArithmeticError, match="not finite"):
        ask(engine, prompt(31, 20))


def test_indexer_selection_has_a_row_per_token_in_the_cache(make_engine: Any) -> None:
    engine = make_engine(chunked_prefill_size=16)
    ask(engine, prompt(32, 40))
    request = ask(engine, prompt(32, 40), max_tokens=5, return_indexer_topk=True)
    assert request.cached_tokens == 0
    assert request.indexer_topk is not None
    assert request.indexer_topk.shape == (44, 3, 4) and request.indexer_topk.dtype == np.int32
    assert request.indexer_topk[:, 0, 0].tolist() == list(range(44))


def test_a_stream_is_served_while_a_long_prompt_is_prefilled(make_engine: Any, tiny_model: Any) -> None:
    engine = make_engine(chunked_prefill_size=4, batch_window_s=0.0)
    stream = Asked(engine, prompt(33, 8), max_tokens=40)
    Asked(engine, prompt(34, 400), max_tokens=1).result()
    stream.result()
    kinds = [kind for kind, _ in tiny_model.calls]
    longest = max(len(run) for run in "".join("p" if kind == "prefill" else "d" for kind in kinds[:100]).split("d"))
    assert longest <= module.PREFILLS_IN_A_ROW + 2  # two more: the stream's own prompt, before anything ran


def test_stopping_fails_what_is_unfinished(make_engine: Any, tiny_model: Any) -> None:
    engine = make_engine()
    gate = Gate()
    tiny_model.before_call = gate
    asked = Asked(engine, prompt(35, 10), max_tokens=1000)
    assert gate.reached.wait(WAIT_S)
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    gate.opened.set()
    with pytest.raises(EngineStoppedError):
        asked.result()
    stopper.join(WAIT_S)
    with pytest.raises(EngineStoppedError):
        Asked(engine, prompt(36, 10))
