"""One question, asked over the OpenAI contract; every way it can go wrong ends in one named class.

`Response.error` is "class: message", with the class one of `ERROR_CLASSES`. Nothing is ever guessed: a reply whose
`prompt_tokens` is not the planned count is void, since it answered another prompt (a second BOS, another template, a
silent cut). Only a connection that broke before any answer arrived is tried again; an answer is never asked for twice.
"""

import asyncio
import contextvars
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import openai

from longrecall.runners.schema import Response

ERROR_CLASSES = (
    "overflow",
    "timeout",
    "connection",
    "cut",
    "invalid-json",
    "invalid-reply",
    "usage",
    "prompt-tokens",
    "cache",
    "history",
    "http 4xx",
    "http 5xx",
)
RETRIES = 3
"""Further tries after a connection that broke with nothing answered."""
_BACKOFF_S = 0.2
_POOLS = 8
"""A pool looks at every connection it holds, twice a request: at 64 connections that is a third of a request's cost."""
_LENGTH_WORDS = (
    "context length", "context window", "context size", "maximum context", "max_model_len", "longer than", "too long",
    "too large", "exceed", "max_position", "maximum length", "input length",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Question:
    """One request of a replay."""

    messages: Sequence[Mapping[str, str]]
    prompt_tokens: int | None
    """The planned count; a reply with another is void. None: not checked."""
    continue_final: bool
    """The last message is an assistant turn to be continued (the begun answer)."""
    max_tokens: int = 12
    stop: tuple[str, ...] = ("\n",)
    cache_salt: str | None = None
    logprobs: bool = True
    cached_at_most: int | None = None
    """The most prompt tokens that may come from a cache; a reply with more is void. None: any number."""
    cached_at_least: int | None = None
    """Prompt tokens that the arm wants from a cache; recorded beside what came."""


@dataclass
class _Attempt:
    """Whether the response headers of the current try have arrived."""

    answered: bool = False


_attempt: contextvars.ContextVar[_Attempt | None] = contextvars.ContextVar("attempt", default=None)


async def _mark_answered(_: object) -> None:
    attempt = _attempt.get()
    if attempt is not None:
        attempt.answered = True


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A served build, ready to be asked."""

    build_id: str
    model: str
    clients: Iterator[openai.AsyncOpenAI]
    """Clients with a connection pool each, in turn."""
    root: str = ""
    """URL of the server, without /v1."""
    returns: frozenset[str] = frozenset()
    """What /generate may be asked to return besides: return_indexer_topk, return_routed_experts."""
    timeout_s: float = 120.0
    echoes_begun_answer: bool = False
    """The server repeats the begun answer at the start of its reply (llama.cpp)."""
    begun_after_generation_prompt: bool = False
    """A begun answer goes behind the generation prompt, which is not to be turned off (SGLang)."""
    stream: bool = False
    """Streamed replies give the time to the first token, and cost the client about four times the CPU."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the server's chat template, sent with every request."""

    @property
    def client(self) -> openai.AsyncOpenAI:
        """The client for the next request."""
        return next(self.clients)


@asynccontextmanager
async def connect(
    build_id: str, base_url: str, *, model: str, timeout_s: float = 120.0, stream: bool = False, api_key: str = "none",
    echoes_begun_answer: bool = False, begun_after_generation_prompt: bool = False,
    returns: frozenset[str] = frozenset(), template_args: Mapping[str, Any] | None = None,
) -> AsyncIterator[Endpoint]:  # fmt: skip
    """An endpoint over a few connection pools; `base_url` is the server's root, without /v1."""
    local = base_url.startswith("http://127.0.0.1")
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(_POOLS):
            http_client = openai.DefaultAsyncHttpxClient(
                event_hooks={"response": [_mark_answered]},
                # A proxy of the environment must not stand between the campaign and the loopback interface.
                trust_env=not local,
                verify=not local,  # plain HTTP: nothing to verify with, and reading the certificates takes 30 ms
            )
            clients.append(
                await stack.enter_async_context(
                    openai.AsyncOpenAI(
                        base_url=base_url.rstrip("/") + "/v1", api_key=api_key, max_retries=0, timeout=timeout_s + 5,
                        http_client=http_client,
                    )
                )
            )  # fmt: skip
        yield Endpoint(
            build_id=build_id,
            model=model,
            clients=itertools.cycle(clients),
            root=base_url.rstrip("/"),
            returns=returns,
            timeout_s=timeout_s,
            stream=stream,
            echoes_begun_answer=echoes_begun_answer,
            begun_after_generation_prompt=begun_after_generation_prompt,
            template_args=template_args or {},
        )


async def ask(endpoint: Endpoint, question: Question, rng: random.Random) -> Response:
    """Ask once; try again only where the connection broke before anything was answered.

    Never raises for what a server or network does: the class of the failure is in `Response.error`.
    """
    for retry in range(RETRIES + 1):
        attempt = _Attempt()
        _attempt.set(attempt)
        started = time.perf_counter()
        try:
            # The limit is on the whole answer: the HTTP client's own (5 s later) starts again with every byte.
            async with asyncio.timeout(endpoint.timeout_s):
                response = await (_ask_stream if endpoint.stream else _ask_whole)(endpoint, question, started)
        except (TimeoutError, openai.APITimeoutError):
            return Response(error=f"timeout: no whole answer within {endpoint.timeout_s:g} s", e2e_ms=_since(started))
        except openai.APIStatusError as problem:
            return Response(error=_status_error(problem), e2e_ms=_since(started))
        except openai.APIConnectionError as problem:
            cause = problem.__cause__ or problem
            what = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
            if attempt.answered:
                return Response(error=f"cut: the answer broke off ({what})", e2e_ms=_since(started))
            if retry == RETRIES:
                return Response(error=f"connection: nothing answered in {RETRIES + 1} tries ({what})")
            await asyncio.sleep(_BACKOFF_S * 2**retry * (0.5 + rng.random()))
            continue
        except _Unusable as problem:
            return Response(error=str(problem), e2e_ms=_since(started))
        if endpoint.echoes_begun_answer and question.continue_final and response.text is not None:
            response = replace(response, text=response.text.removeprefix(question.messages[-1]["content"]))
        return _checked(replace(response, cached_at_least=question.cached_at_least), question)
    raise AssertionError("unreachable")


class _Unusable(Exception):
    """A reply came and cannot be used; the text is the error."""


def _since(started: float) -> float:
    return round((time.perf_counter() - started) * 1000, 3)


def _body(endpoint: Endpoint, question: Question) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": endpoint.model,
        "messages": question.messages,
        "temperature": 0,
        "max_tokens": question.max_tokens,
    }
    if question.stop:
        body["stop"] = question.stop
    if question.logprobs:
        body["logprobs"] = True
    if question.continue_final:
        body["continue_final_message"] = True
        if not endpoint.begun_after_generation_prompt:
            body["add_generation_prompt"] = False
    if question.cache_salt is not None:
        body["cache_salt"] = question.cache_salt
    if endpoint.template_args:
        body["chat_template_kwargs"] = dict(endpoint.template_args)
    return body


async def _ask_whole(endpoint: Endpoint, question: Question, started: float) -> Response:
    # By path and as bytes: `chat.completions.create` checks every key of every message against its types and builds a
    # model of every logprob, which takes more processor time than the request itself, and hides invalid JSON.
    content = await endpoint.client.post("/chat/completions", cast_to=bytes, body=_body(endpoint, question))
    e2e_ms = _since(started)
    body = _json_object(content)
    choice = _choice(body)
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else None
    if not isinstance(text, str | None):
        raise _Unusable(f"invalid-reply: content is {type(text).__name__}")
    response = Response(
        text=text if text is not None else "",
        finish_reason=_text_or_none(choice.get("finish_reason")),
        token_logprobs=_logprobs(choice),
        e2e_ms=e2e_ms,
    )
    return _with_usage(response, body.get("usage"))


async def _ask_stream(endpoint: Endpoint, question: Question, started: float) -> Response:
    body = _body(endpoint, question) | {"stream": True, "stream_options": {"include_usage": True}}
    text: list[str] = []
    logprobs: list[float] = []
    finish: str | None = None
    usage: object = None
    ttft_ms: float | None = None
    done = False
    create = endpoint.client.chat.completions.with_streaming_response.create
    async with create(model=endpoint.model, messages=[], stream=True, extra_body=body) as raw:
        lines = raw.iter_lines()
        while True:
            try:
                line = await anext(lines, None)
            except openai.OpenAIError:
                raise
            except Exception as problem:  # the HTTP library's own classes: httpx or httpx2, by openai's version
                raise _Unusable(f"cut: the stream broke off ({type(problem).__name__})") from problem
            if line is None:
                break
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                done = True
                continue
            chunk = _json_object(data.encode())
            if chunk.get("usage") is not None:
                usage = chunk["usage"]
            if not chunk.get("choices"):
                continue
            choice = _choice(chunk)
            delta = choice.get("delta")
            piece = delta.get("content") if isinstance(delta, dict) else None
            if piece:
                ttft_ms = ttft_ms or _since(started)
                text.append(piece)
            logprobs += _logprobs(choice) or ()
            finish = _text_or_none(choice.get("finish_reason")) or finish
    if not done or finish is None:
        raise _Unusable("cut: the stream ended before [DONE]")
    response = Response(
        text="".join(text),
        finish_reason=finish,
        token_logprobs=tuple(logprobs) or None,
        ttft_ms=ttft_ms,
        e2e_ms=_since(started),
    )
    return _with_usage(response, usage)


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except ValueError:
        raise _Unusable(f"invalid-json: {data[:80]!r}") from None
    if not isinstance(body, dict):
        raise _Unusable(f"invalid-reply: a {type(body).__name__}, not an object")
    if isinstance(body.get("error"), dict) and "choices" not in body:
        raise _Unusable(f"invalid-reply: an error with status 200: {str(body['error'])[:200]}")
    return body


def _choice(body: dict[str, Any]) -> dict[str, Any]:
    choices = body.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise _Unusable(f"invalid-reply: choices = {str(choices)[:80]}")
    return choices[0]


def _logprobs(choice: dict[str, Any]) -> tuple[float, ...] | None:
    block = choice.get("logprobs")
    content = block.get("content") if isinstance(block, dict) else None
    if not isinstance(content, list):
        return None
    values = [item.get("logprob") if isinstance(item, dict) else None for item in content]
    known = [float(value) for value in values if isinstance(value, int | float)]
    return tuple(known) if len(known) == len(values) else None


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _with_usage(response: Response, usage: object) -> Response:
    if not isinstance(usage, dict):
        return response
    details = usage.get("prompt_tokens_details")
    return replace(
        response,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
    )


def _status_error(problem: openai.APIStatusError) -> str:
    """ "overflow: …" for a refusal of the length, else "http 429: …"."""
    body = problem.body
    if isinstance(body, dict):
        body = body.get("error", body)
    said = body.get("message") if isinstance(body, dict) else None
    text = str(said if said is not None else problem.message)[:300]
    status = problem.status_code
    if status == 413 or (status in (400, 422) and any(word in text.lower() for word in _LENGTH_WORDS)):
        return f"overflow: {text}"
    return f"http {status}: {text}"


def _checked(response: Response, question: Question) -> Response:
    """`response`, or the same marked void when its token counts are not what was asked for."""
    served = response.prompt_tokens
    if question.prompt_tokens is None:
        return response
    if served is None:
        return replace(response, error="usage: the reply does not say its prompt_tokens")
    if served != question.prompt_tokens:
        return replace(
            response, error=f"prompt-tokens: planned {question.prompt_tokens}, served {response.prompt_tokens}"
        )
    if response.cached_tokens is not None and response.cached_tokens > served:
        return replace(response, error=f"usage: cached_tokens {response.cached_tokens} of {served} prompt tokens")
    limit = question.cached_at_most
    if limit is not None and response.cached_tokens is not None and response.cached_tokens > limit:
        return replace(
            response,
            error=f"cache: {response.cached_tokens} prompt tokens came from a cache; this arm allows {limit}",
        )
    return response


def error_class(error: str) -> str:
    """The class of `Response.error`; statuses are folded into "http 4xx" and "http 5xx"."""
    name = error.partition(":")[0]
    if name.startswith("http "):
        return f"http {name[5:6]}xx"
    return name
