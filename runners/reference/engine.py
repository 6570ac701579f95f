"""Continuous batching for the reference build: one thread owns the model, requests queue before it.

Each turn of the loop is one prefill call (several sequences packed, long prompts in chunks) or one decode call (every
running sequence, one token). Prefill goes first, so that requests sent together decode together, which is where a CPU
gains most: a decode step reads all weights once, for one sequence or for 24. Prompts sharing a prefix that is being
computed wait for it instead of computing it again.

The engine knows token ids, text and sampling; HTTP is server.py's.
"""

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import psutil
import torch

from longrecall.runners.reference.interface import Chunk, Logits, Model, SequenceCache
from longrecall.runners.reference.prefix_cache import Entry, PrefixCache, Tokens, common_prefix
from longrecall.runners.reference.request import EngineStoppedError, FinishReason, Progress, QueueFullError, Request
from longrecall.runners.reference.sampling import Sampling, TokenLogprob, draw, held_back, token_logprobs
from longrecall.runners.reference.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

# A prompt waits for another's prefill when that saves it more than this many tokens and this part of its own.
SHARED_TOKENS, SHARED_PART = 32, 8
MAX_ALL_LOGITS = 128  # tokens per step whose whole logits rows are kept: 1 MiB each at a vocabulary of 262,144
PREFILLS_IN_A_ROW = 8  # then the running sequences get a token, so that a stream never stalls for a 32K prompt


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How requests are scheduled."""

    chunked_prefill_size: int = 2048
    """Most prompt tokens of one prefill call, all sequences together."""
    max_running_requests: int = 32
    max_queued_requests: int = 256
    max_total_tokens: int = 131_072
    """Bound on the sum of prompt and completion tokens of running sequences (memory)."""
    prefix_cache_bytes: int = 512 * 2**20
    """0 turns the prefix cache off."""
    batch_window_s: float = 0.004
    """An idle engine starts once no request has arrived for this long…"""
    max_batch_window_s: float = 0.1
    """…or after this long in any case."""
    random_seed: int = 0


@dataclass(kw_only=True)
class Counters:
    """What the engine has done since it started; times in seconds of wall clock."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    prefill_calls: int = 0
    decode_calls: int = 0
    prefill_s: float = 0.0
    """Inside the model's prefill."""
    decode_s: float = 0.0
    """Inside the model's decode."""
    busy_s: float = 0.0
    """Any work at all, the model's included."""
    requests: int = 0
    aborted: int = 0


class _Sequence:
    """A request that has been admitted."""

    def __init__(self, request: Request, tokenizer: TextTokenizer, generator: torch.Generator | None) -> None:
        self.request = request
        self.tokens: Tokens = np.asarray(request.token_ids, dtype=np.int32)
        self.cache: SequenceCache
        self.position = 0
        """Prompt tokens in the cache."""
        self.entry: Entry | None = None
        self.generator = generator
        self.decoder = tokenizer.decoder()
        self.emitted_chars = 0
        self.emitted_tokens = 0
        self.topk_rows: list[npt.NDArray[np.int32]] = []

    @property
    def first_logits(self) -> int:
        """Index of the first prompt token after which logits are needed; len(tokens) when none are."""
        start = self.request.prompt_logprob_start
        if start is not None and start < len(self.tokens):
            return max(start - 1, 0)
        return len(self.tokens) - (1 if self.request.sampling.max_tokens else 0)

    @property
    def budget_tokens(self) -> int:
        return len(self.tokens) + self.request.sampling.max_tokens


IDLE_S = 0.5
"""Without a request for so long, a server returns freed memory to a system that is short of it."""

SHORT_OF_MEMORY = 0.2
"""Share of a machine's memory that is still free."""


def _give_memory_back() -> None:
    """glibc keeps what a batch freed (a gigabyte and more); other libcs have no such call and need none.

    Only where memory is short: taking it again page by page would slow the next batch.
    """
    memory = psutil.virtual_memory()
    if memory.available > SHORT_OF_MEMORY * memory.total:
        return
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return


class Engine:
    """Runs requests on a model in a thread of its own. `start`, `submit`, `stop`."""

    def __init__(
        self,
        model: Model,
        tokenizer: TextTokenizer,
        settings: Settings,
        *,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self.counters = Counters()
        self.prefix_cache = PrefixCache(settings.prefix_cache_bytes)
        self.arriving = 0
        """Requests being read and tokenized by the server: an idle engine waits for them a moment."""
        self._on_thread_start = on_thread_start
        self._changed = threading.Condition()
        self._inbox: deque[Request] = deque()
        self._waiting: list[_Sequence] = []
        self._prefilling: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._prefills_in_a_row = 0
        self._flush: list[Callable[[bool], None]] = []
        self._stopping = False
        self._seeds = torch.Generator().manual_seed(settings.random_seed)
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End after the step under way; requests not finished get an EngineStoppedError."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_requests(self) -> int:
        """Requests waiting or running."""
        return len(self._inbox) + len(self._waiting) + len(self._prefilling) + len(self._running)

    def submit(self, request: Request) -> None:
        """Queue a request. QueueFullError when the queue is full, EngineStoppedError after `stop`."""
        if not request.token_ids:
            raise ValueError("a request needs at least one token")
        with self._changed:
            if self._stopping or not self._thread.is_alive():
                raise EngineStoppedError("the engine is not running")
            limit = self.settings.max_queued_requests + self.settings.max_running_requests
            if self.num_requests >= limit:
                raise QueueFullError(f"the server holds {limit} requests already; try again later")
            self._inbox.append(request)
            self._changed.notify()

    def flush_cache(self, done: Callable[[bool], None]) -> None:
        """Empty the prefix cache; `done(False)` from the engine's thread when requests are being served."""
        with self._changed:
            self._flush.append(done)
            self._changed.notify()

    # Everything below runs in the engine's thread.

    def _run(self) -> None:
        if self._on_thread_start is not None:
            self._on_thread_start()
        try:
            with torch.inference_mode():
                while self._take():
                    start = time.perf_counter()
                    self._step()
                    self.counters.busy_s += time.perf_counter() - start
        finally:
            self._stopping = True
            for sequence in [*self._waiting, *self._prefilling, *self._running]:
                self._fail(sequence, EngineStoppedError("the server is stopping"))
            while self._inbox:
                self._inbox.popleft().sink(Progress("", (), True, EngineStoppedError("the server is stopping")))

    def _take(self) -> bool:
        """Move new requests into the waiting list, waiting for some when there is nothing to do; False to stop."""
        with self._changed:
            idle = not (self._waiting or self._prefilling or self._running)
            trimmed = False
            while not (self._inbox or self._flush or self._stopping) and idle:
                if not self._changed.wait(None if trimmed else IDLE_S) and not trimmed:
                    # a campaign holds a server per build and asks one after another: what a batch needed goes back
                    _give_memory_back()
                    trimmed = True
            if idle and self._inbox:
                self._wait_for_company()
            arrived = list(self._inbox)
            self._inbox.clear()
            # By content, not by arrival: the same set of requests makes the same batches, and so the same rounding.
            # Short prompts first, so that none waits for the chunks of a long one that came with it.
            # Under the lock: a request in neither list would let one too many into the queue.
            for request in sorted(arrived, key=lambda r: (len(r.token_ids), r.cache_salt, r.token_ids)):
                self._waiting.append(_Sequence(request, self.tokenizer, self._generator(request.sampling)))
            flushes, self._flush = self._flush, []
            stopping = self._stopping
        self.counters.requests += len(arrived)
        for done in flushes:
            free = not (self._waiting or self._prefilling or self._running)
            if free:
                self.prefix_cache.clear()
            done(free)
        return not stopping

    def _wait_for_company(self) -> None:
        """Requests sent together arrive one by one; start when none has come for a moment and none is on its way."""
        deadline = time.perf_counter() + self.settings.max_batch_window_s
        quiet_since, seen = time.perf_counter(), len(self._inbox)
        while not self._stopping and len(self._inbox) < self.settings.max_running_requests:
            now = time.perf_counter()
            quiet_until = quiet_since + self.settings.batch_window_s
            if now >= deadline or (now >= quiet_until and self.arriving <= 0):
                return
            self._changed.wait(min(deadline, max(quiet_until, now + 0.001)) - now)
            if len(self._inbox) != seen:
                quiet_since, seen = time.perf_counter(), len(self._inbox)

    def _generator(self, sampling: Sampling) -> torch.Generator | None:
        if sampling.temperature == 0:
            return None
        seed = sampling.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        return torch.Generator().manual_seed(seed % 2**63)

    def _step(self) -> None:
        self._drop_cancelled()
        self._admit()
        if self._prefilling and (not self._running or self._prefills_in_a_row < PREFILLS_IN_A_ROW):
            self._prefills_in_a_row += 1
            self._prefill()
        elif self._running:
            self._prefills_in_a_row = 0
            self._decode()

    def _drop_cancelled(self) -> None:
        for group in (self._waiting, self._prefilling, self._running):
            for sequence in [s for s in group if s.request.cancelled]:
                group.remove(sequence)
                self.counters.aborted += 1
                if group is not self._waiting:
                    self._store(sequence, pinned=False)
                self._finish(sequence, "abort")

    def _admit(self) -> None:
        """Give waiting sequences, oldest first, a cache to prefill into."""
        admitted = [*self._prefilling, *self._running]
        tokens = sum(sequence.budget_tokens for sequence in admitted)
        left: list[_Sequence] = []
        for i, sequence in enumerate(self._waiting):
            if admitted and (
                len(admitted) >= self.settings.max_running_requests
                or tokens + sequence.budget_tokens > self.settings.max_total_tokens
            ):
                left.extend(self._waiting[i:])
                break
            # the last prompt token is always computed, for its logits
            limit = 0 if sequence.request.return_indexer_topk else min(sequence.first_logits, len(sequence.tokens) - 1)
            match = self.prefix_cache.match(sequence.tokens, salt=sequence.request.cache_salt, limit=limit)
            cached = match.length if match else 0
            if self._worth_waiting(sequence, cached, limit):
                left.append(sequence)
                continue
            sequence.cache = match.cache.fork(match.length) if match else self.model.new_cache()
            sequence.position = sequence.request.cached_tokens = cached
            self.counters.cached_tokens += cached
            self._prefilling.append(sequence)
            admitted.append(sequence)
            tokens += sequence.budget_tokens
        self._waiting = left

    def _worth_waiting(self, sequence: _Sequence, cached: int, limit: int) -> bool:
        if not self.settings.prefix_cache_bytes:
            return False
        worth = max(SHARED_TOKENS, (len(sequence.tokens) - cached) // SHARED_PART)
        return any(
            min(common_prefix(other.tokens, sequence.tokens), limit) > cached + worth
            for other in self._prefilling
            if other.request.cache_salt == sequence.request.cache_salt
        )

    def _prefill(self) -> None:
        budget, rows = self.settings.chunked_prefill_size, MAX_ALL_LOGITS
        taken: list[_Sequence] = []
        chunks: list[Chunk] = []
        for sequence in self._prefilling:
            end = len(sequence.tokens)
            size = min(end - sequence.position, budget)
            logits: Logits = "none"
            first = sequence.first_logits
            if sequence.position >= first and sequence.request.prompt_logprob_start is not None:
                size, logits = min(size, rows), "all"
                rows -= size
            elif first < end - 1:
                size = min(size, first - sequence.position)
            elif first == end - 1 and sequence.position + size == end:
                logits = "last"
            if size <= 0:
                continue
            budget -= size
            taken.append(sequence)
            tokens = sequence.tokens[sequence.position : sequence.position + size].tolist()
            chunks.append(Chunk(tokens=tokens, cache=sequence.cache, logits=logits))
        start = time.perf_counter()
        self.model.capture_indexer_topk = any(sequence.request.return_indexer_topk for sequence in taken)
        try:
            outputs = self.model.prefill(chunks)
        except Exception as error:
            self._fail_all(taken, error)
            return
        self.counters.prefill_s += time.perf_counter() - start
        self.counters.prefill_calls += 1
        self.counters.prefill_tokens += sum(len(chunk.tokens) for chunk in chunks)
        self._collect_topk(taken, [len(chunk.tokens) for chunk in chunks])
        finished: list[_Sequence] = []
        last_rows: list[torch.Tensor] = []
        for sequence, chunk, output in zip(taken, chunks, outputs, strict=True):
            if chunk.logits == "all":
                self._score_prompt(sequence, output)
            sequence.position += len(chunk.tokens)
            if sequence.position < len(sequence.tokens):
                continue
            if sequence.request.sampling.max_tokens:
                finished.append(sequence)
                last_rows.append(output[-1])
                self._running.append(sequence)  # before it leaves the other list: it counts as one of the queue
            self._prefilling.remove(sequence)
            self._store(sequence, pinned=True)
            if not sequence.request.sampling.max_tokens:
                self._store(sequence, pinned=False)
                self._finish(sequence, "length")
        if finished:
            self._sample(finished, torch.stack(last_rows))

    def _decode(self) -> None:
        batch = list(self._running)
        start = time.perf_counter()
        self.model.capture_indexer_topk = any(sequence.request.return_indexer_topk for sequence in batch)
        try:
            logits = self.model.decode(
                [sequence.request.output_ids[-1] for sequence in batch], [sequence.cache for sequence in batch]
            )
        except Exception as error:
            self._fail_all(batch, error)
            return
        self.counters.decode_s += time.perf_counter() - start
        self.counters.decode_calls += 1
        self.counters.decode_tokens += len(batch)
        self._collect_topk(batch, [1] * len(batch))
        self._sample(batch, logits)

    def _collect_topk(self, sequences: Sequence[_Sequence], sizes: Sequence[int]) -> None:
        captured = self.model.last_indexer_topk if self.model.capture_indexer_topk else None
        if captured is None:
            return
        parts = captured.cpu().numpy()
        row = 0
        for sequence, size in zip(sequences, sizes, strict=True):
            if sequence.request.return_indexer_topk:
                sequence.topk_rows.append(parts[row : row + size].astype(np.int32))
            row += size

    def _score_prompt(self, sequence: _Sequence, logits: torch.Tensor) -> None:
        """Logprobs of the prompt tokens that follow the positions of `logits`."""
        request = sequence.request
        start = request.prompt_logprob_start
        assert start is not None
        if start == 0 and sequence.position == 0:
            request.prompt_logprobs.append(TokenLogprob(request.token_ids[0], None, ()))
        first = sequence.position + 1
        targets = request.token_ids[first : first + len(logits)]
        request.prompt_logprobs.extend(
            token_logprobs(logits[: len(targets)], targets, [request.top_logprobs or 0] * len(targets))
        )

    def _sample(self, sequences: Sequence[_Sequence], logits: torch.Tensor) -> None:
        """Choose the next token of each sequence from its row of `logits` [B, V] and pass it on."""
        best, argmax = logits.max(dim=-1)  # NaN counts as the greatest, so one look at the maximum finds it
        if not bool(best.isfinite().all()):
            finite: list[bool] = best.isfinite().tolist()
            bad = [sequence for sequence, ok in zip(sequences, finite, strict=True) if not ok]
            self._fail_all(bad, ArithmeticError("the model's logits are not finite"))
            keep = [i for i, ok in enumerate(finite) if ok]
            sequences, logits, argmax = [sequences[i] for i in keep], logits[keep], argmax[keep]
            if not sequences:
                return
        chosen: list[int] = argmax.tolist()
        for i, sequence in enumerate(sequences):
            if sequence.generator is not None:
                chosen[i] = draw(logits[i], sequence.request.sampling, sequence.generator)
        wanted = [i for i, s in enumerate(sequences) if s.request.top_logprobs is not None]
        scored: dict[int, TokenLogprob] = {}
        if wanted:
            rows = logits if len(wanted) == len(sequences) else logits[wanted]
            tops = [sequences[i].request.top_logprobs or 0 for i in wanted]
            scored = dict(zip(wanted, token_logprobs(rows, [chosen[i] for i in wanted], tops), strict=True))
        for i, (sequence, token_id) in enumerate(zip(sequences, chosen, strict=True)):
            self._append(sequence, token_id, scored.get(i))

    def _append(self, sequence: _Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        request, sampling = sequence.request, sequence.request.sampling
        request.output_ids.append(token_id)
        if logprob is not None:
            request.output_logprobs.append(logprob)
        if request.first_token_s is None:
            request.first_token_s = time.perf_counter()
        reason: FinishReason | None = None
        if (token_id == self.tokenizer.eos_id and not sampling.ignore_eos) or token_id in sampling.stop_token_ids:
            reason, request.matched_stop = "stop", token_id
        else:
            before = len(request.text)
            request.text += sequence.decoder.push(token_id)
            if len(request.output_ids) >= sampling.max_tokens:
                reason = "length"
            if (stop := self._find_stop(request, before)) is not None:
                reason = "stop"
                request.matched_stop = stop
        if reason is not None:
            self._running.remove(sequence)
            self._store(sequence, pinned=False)
            if not isinstance(request.matched_stop, str):  # a stop string has cut the text already
                request.text += sequence.decoder.finish()
            self._finish(sequence, reason)
        elif request.stream:
            self._report(sequence, hold=held_back(request.text, sampling.stop))

    def _find_stop(self, request: Request, before: int) -> str | None:
        """The stop string that begins first in the text, which is cut before it."""
        found: tuple[int, str] | None = None
        for stop in request.sampling.stop:
            at = request.text.find(stop, max(before - len(stop) + 1, 0))
            if at >= 0 and (found is None or at < found[0]):
                found = at, stop
        if found is None:
            return None
        request.text = request.text[: found[0]]
        return found[1]

    def _store(self, sequence: _Sequence, *, pinned: bool) -> None:
        """Offer the sequence's cache for reuse; pinned while it still grows."""
        if not self.settings.prefix_cache_bytes:
            return
        if sequence.entry is not None:
            self.prefix_cache.remove(sequence.entry)
        held = np.asarray([*sequence.request.token_ids, *sequence.request.output_ids], dtype=np.int32)
        held = held[: sequence.cache.length]  # the token sampled last is not in the cache
        sequence.entry = self.prefix_cache.insert(held, sequence.cache, salt=sequence.request.cache_salt, pinned=pinned)

    def _finish(self, sequence: _Sequence, reason: FinishReason) -> None:
        request = sequence.request
        request.finish_reason = reason
        request.finished_s = time.perf_counter()
        if sequence.topk_rows:
            rows = np.concatenate(sequence.topk_rows)
            request.indexer_topk = rows[: len(request.token_ids) + len(request.output_ids) - 1]
        if request.stream:
            self._report(sequence, hold=0, finished=True)
        else:
            request.sink(Progress("", (), True))

    def _report(self, sequence: _Sequence, *, hold: int, finished: bool = False) -> None:
        request = sequence.request
        end = len(request.text) - hold
        text = request.text[sequence.emitted_chars : end]
        tokens = tuple(request.output_logprobs[sequence.emitted_tokens :])
        if text or tokens or finished:
            sequence.emitted_chars = max(end, sequence.emitted_chars)
            sequence.emitted_tokens += len(tokens)
            request.sink(Progress(text, tokens, finished))

    def _fail_all(self, sequences: Sequence[_Sequence], error: Exception) -> None:
        """The caches of a failed call are in an unknown state: drop them, and let the others go on."""
        logger.error("the model failed on %d sequences", len(sequences), exc_info=error)
        for sequence in sequences:
            for group in (self._prefilling, self._running):
                if sequence in group:
                    group.remove(sequence)
            if sequence.entry is not None:
                self.prefix_cache.remove(sequence.entry)
            self._fail(sequence, error)

    def _fail(self, sequence: _Sequence, error: Exception) -> None:
        sequence.request.finish_reason = "abort"
        sequence.request.sink(Progress("", (), True, error))
