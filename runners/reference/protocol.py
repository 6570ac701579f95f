"""Bodies of the OpenAI and SGLang routes, read and checked.

Every field is taken from the body once, with its type and range; what is left over is refused by name, as OpenAI does,
so that a misspelt parameter never goes unnoticed. Fields that cannot change an answer here are ignored by name.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longrecall.runners.reference.sampling import Sampling
from longrecall.runners.reference.tokenizer import TextTokenizer

IGNORED = frozenset(
    ("chat_template_kwargs", "metadata", "parallel_tool_calls", "prompt_cache_key", "rid", "safety_identifier",
     "separate_reasoning", "service_tier", "skip_special_tokens", "spaces_between_special_tokens", "store",
     "stream_reasoning", "user", "return_text_in_logprobs")
)  # fmt: skip
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 64
CHAT_MAX_TOKENS, COMPLETION_MAX_TOKENS, GENERATE_MAX_TOKENS = 256, 16, 128
"""Tokens generated when the request does not say: OpenAI has no bound for chat (a base model seldom ends by itself),
16 for completions; SGLang's /generate has 128."""


class ApiError(Exception):
    """An error in OpenAI's shape: {"error": {message, type, param, code}}."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def encode_json(value: object) -> bytes:
    """JSON in ASCII: a lone surrogate in a request may be quoted back in an error, and has no UTF-8 form."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


class Body:
    """A JSON object whose fields are taken one by one."""

    def __init__(self, raw: bytes | Mapping[str, Any], *, where: str = "") -> None:
        if isinstance(raw, bytes):
            try:
                raw = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise ApiError(400, f"We could not parse the JSON body of your request: {error}") from error
        if not isinstance(raw, dict):
            raise ApiError(400, f"The {where or 'body'} must be a JSON object, but it is a {type(raw).__name__}.")
        self._fields = {name: value for name, value in raw.items() if value is not None}
        self._where = f"{where}." if where else ""

    def error(self, name: str, message: str, *, code: str | None = None) -> ApiError:
        return ApiError(400, f"Invalid '{self._where}{name}': {message}", param=self._where + name, code=code)

    def has(self, name: str) -> bool:
        return name in self._fields

    def take(self, name: str) -> Any:
        """Any value; None when absent or null."""
        return self._fields.pop(name, None)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"expected a boolean, but got {_short(value)} instead.")
        return value

    def integer(self, name: str, default: int | None, *, low: int, high: int = 2**63 - 1) -> int | None:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"expected an integer, but got {_short(value)} instead.")
        if not low <= value <= high:
            bound = f"below minimum value. Expected a value >= {low}" if value < low else f"above maximum value {high}"
            raise self.error(name, f"integer {bound}, but got {_short(value)} instead.")
        return value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"expected a number, but got {_short(value)} instead.")
        if not low <= value <= high:  # NaN fails too
            raise self.error(name, f"expected a number from {low:g} to {high:g}, but got {_short(value)} instead.")
        return float(value)

    def string(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, f"expected a string, but got {_short(value)} instead.")
        return value

    def token_ids(self, name: str, value: Any, vocab_size: int) -> list[int]:
        """`value` as a non-empty list of ids within the vocabulary."""
        if not isinstance(value, list) or not value:
            raise self.error(name, "expected a non-empty list of token ids.")
        for item in value:
            if type(item) is not int or not 0 <= item < vocab_size:
                raise self.error(name, f"{_short(item)} is not a token id from 0 to {vocab_size - 1}.")
        return value

    def refuse_unless(self, name: str, *neutral: Any, why: str) -> None:
        """Refuse a parameter this server does not carry out, unless its value asks for nothing."""
        value = self.take(name)
        if value is not None and not any(value == allowed for allowed in neutral):
            raise self.error(name, f"{_short(value)} is not supported: {why}.")

    def refuse_rest(self) -> None:
        unknown = sorted(set(self._fields) - IGNORED)
        if unknown:
            raise ApiError(
                400,
                f"Unrecognized request argument supplied: {_short(self._where + unknown[0])}",
                param=self._where + unknown[0],
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the served model can take."""

    context_length: int
    vocab_size: int
    model_name: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """One HTTP request, understood: the sequences to run and how to answer."""

    prompts: list[list[int]]
    sampling: Sampling
    top_logprobs: int | None
    prompt_logprob_start: int | None
    cache_salt: str
    return_indexer_topk: bool = False
    stream: bool
    include_usage: bool = False
    echo: bool = False
    batched: bool = False
    """The prompt was a list of prompts, so the answer is a list too (/generate)."""


def _check_model(body: Body, limits: Limits) -> None:
    model = body.string("model")
    if model is not None and model != limits.model_name:
        raise ApiError(
            404,
            f"The model {_short(model)} does not exist; this server serves {limits.model_name!r}.",
            param="model",
            code="model_not_found",
        )


def _stops(body: Body) -> tuple[str, ...]:
    value = body.take("stop")
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise body.error("stop", "expected a string or a list of strings.")
    if len(stops) > MAX_STOPS:
        raise body.error("stop", f"expected at most {MAX_STOPS} stop sequences, but got {len(stops)}.")
    return tuple(stop for stop in stops if stop)


def _sampling(body: Body, limits: Limits, max_tokens: int | None, default: int, longest_prompt: int) -> Sampling:
    """The sampling fields; `max_tokens` as asked, or None for `default` cut to what fits."""
    context = limits.context_length
    if longest_prompt + (max_tokens or 0) > context or (longest_prompt >= context and max_tokens is None):
        asked = f"{longest_prompt} in the prompt" + (f", {max_tokens} in the completion" if max_tokens else "")
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{longest_prompt + (max_tokens or 0)} tokens ({asked}). Please reduce the length of either.",
            param="messages" if default == CHAT_MAX_TOKENS else "prompt",
            code="context_length_exceeded",
        )
    stop_ids = body.take("stop_token_ids")
    top_k = body.integer("top_k", 0, low=-1, high=limits.vocab_size)
    for name, neutral in (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1), ("min_p", 0)):
        body.refuse_unless(name, neutral, why="this server applies no penalties")
    body.refuse_unless("n", 1, why="one choice per request; send several requests")
    body.refuse_unless("logit_bias", {}, why="this server applies no bias")
    body.refuse_unless("min_tokens", 0, why="send ignore_eos")
    return Sampling(
        temperature=body.number("temperature", 1.0, low=0.0, high=100.0),
        top_p=body.number("top_p", 1.0, low=0.0, high=1.0),
        top_k=max(top_k or 0, 0),
        max_tokens=max_tokens if max_tokens is not None else min(default, context - longest_prompt),
        stop=_stops(body),
        stop_token_ids=tuple(body.token_ids("stop_token_ids", stop_ids, limits.vocab_size)) if stop_ids else (),
        ignore_eos=body.boolean("ignore_eos", False),
        seed=body.integer("seed", None, low=-(2**63)),
    )


def _salt(body: Body) -> str:
    parts = [body.string("cache_salt"), body.string("extra_key")]
    return json.dumps(parts) if any(parts) else ""


def _stream(body: Body) -> tuple[bool, bool]:
    options = body.take("stream_options")
    if options is not None and not isinstance(options, dict):
        raise body.error("stream_options", "expected an object.")
    return body.boolean("stream", False), bool((options or {}).get("include_usage"))


def _messages(body: Body) -> list[dict[str, Any]]:
    """The messages with text parts joined; everything that is not text is refused."""
    messages = body.take("messages")
    if not isinstance(messages, list) or not messages:
        raise body.error("messages", "expected a non-empty list of messages.")
    result = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise body.error(f"messages[{i}]", "expected an object with a role and a content.")
        content = message.get("content")
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, dict) else part for part in content]
            strings = [text for text in texts if isinstance(text, str)]
            if len(strings) < len(texts):
                raise body.error(f"messages[{i}].content", "only text parts are supported.")
            content = "".join(strings)
        if not isinstance(content, str) and (content is not None or message["role"] != "assistant"):
            raise body.error(f"messages[{i}].content", f"expected a string, but got {_short(content)} instead.")
        result.append({**message, "content": content})
    return result


def _encode_chat(body: Body, tokenizer: TextTokenizer) -> list[int]:
    messages = _messages(body)
    continues = body.boolean("continue_final_message", False)
    if continues and messages[-1]["role"] != "assistant":
        raise body.error("continue_final_message", "the last message must be the assistant's.")
    text = tokenizer.render(
        messages,
        add_generation_prompt=body.boolean("add_generation_prompt", not continues),
        continue_final_message=continues,
    )
    return tokenizer.encode(text)


def read_chat(raw: bytes, tokenizer: TextTokenizer, limits: Limits) -> Job:
    """/v1/chat/completions"""
    body = Body(raw)
    _check_model(body, limits)
    tokens = _encode_chat(body, tokenizer)
    for name in ("tools", "functions"):
        body.refuse_unless(name, [], why="this model calls no tools; tool turns in messages are shown as text")
    body.refuse_unless("tool_choice", "none", "auto", why="this model calls no tools")
    body.refuse_unless("response_format", {"type": "text"}, why="only text is generated")
    wants = body.boolean("logprobs", False)
    top = body.integer("top_logprobs", 0, low=0, high=MAX_TOP_LOGPROBS)
    if top and not wants:
        raise body.error("top_logprobs", "'logprobs' must be true to use it.")
    old_max, new_max = body.integer("max_tokens", None, low=0), body.integer("max_completion_tokens", None, low=0)
    stream, include_usage = _stream(body)
    job = Job(
        prompts=[tokens],
        sampling=_sampling(body, limits, new_max if new_max is not None else old_max, CHAT_MAX_TOKENS, len(tokens)),
        top_logprobs=top if wants else None,
        prompt_logprob_start=None,
        cache_salt=_salt(body),
        stream=stream,
        include_usage=include_usage,
    )
    body.refuse_rest()
    return job


def _prompts(
    body: Body, name: str, value: Any, tokenizer: TextTokenizer, limits: Limits
) -> tuple[list[list[int]], bool]:
    """Prompts from a text, a list of texts, of ids or of lists of ids; and whether it was a list of prompts."""
    bos = body.boolean("add_special_tokens", True)
    if isinstance(value, str):
        return [tokenizer.encode(value, bos=bos)], False
    if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
        if len(value) > MAX_PROMPTS:
            raise body.error(name, f"expected at most {MAX_PROMPTS} prompts, but got {len(value)}.")
        return [
            tokenizer.encode(item, bos=bos) if isinstance(item, str) else body.token_ids(name, item, limits.vocab_size)
            for item in value
        ], True
    return [body.token_ids(name, value, limits.vocab_size)], False


def read_completion(raw: bytes, tokenizer: TextTokenizer, limits: Limits) -> Job:
    """/v1/completions. `logprob_start_len` is an extension: with echo, earlier prompt tokens get null logprobs."""
    body = Body(raw)
    _check_model(body, limits)
    if not body.has("prompt"):
        raise body.error("prompt", "you must provide a prompt.")
    prompts, _ = _prompts(body, "prompt", body.take("prompt"), tokenizer, limits)
    body.refuse_unless("suffix", "", why="this model does not fill in")
    body.refuse_unless("best_of", 1, why="one choice per prompt")
    echo = body.boolean("echo", False)
    top = body.integer("logprobs", None, low=0, high=MAX_TOP_LOGPROBS)
    start = body.integer("logprob_start_len", 0, low=0)
    stream, include_usage = _stream(body)
    if stream and len(prompts) > 1:
        raise body.error("stream", "one prompt at a time can be streamed.")
    longest = max(map(len, prompts))
    job = Job(
        prompts=prompts,
        sampling=_sampling(body, limits, body.integer("max_tokens", None, low=0), COMPLETION_MAX_TOKENS, longest),
        top_logprobs=top,
        prompt_logprob_start=start if echo and top is not None else None,
        cache_salt=_salt(body),
        stream=stream,
        include_usage=include_usage,
        echo=echo,
    )
    _check_prompts(body, "prompt", prompts)
    body.refuse_rest()
    return job


def _check_prompts(body: Body, name: str, prompts: Sequence[Sequence[int]]) -> None:
    if not all(prompts):
        raise body.error(name, "an empty prompt has nothing to continue.")


def read_generate(raw: bytes, tokenizer: TextTokenizer, limits: Limits) -> Job:
    """SGLang's /generate."""
    body = Body(raw)
    names = [name for name in ("input_ids", "text") if body.has(name)]
    if len(names) != 1:
        raise body.error("input_ids", "give either input_ids or text.")
    prompts, batched = _prompts(body, names[0], body.take(names[0]), tokenizer, limits)
    _check_prompts(body, names[0], prompts)
    options = Body(body.take("sampling_params") or {}, where="sampling_params")
    new_tokens = options.integer("max_new_tokens", GENERATE_MAX_TOKENS, low=0)
    options.refuse_unless("min_new_tokens", 0, why="send ignore_eos")
    sampling = _sampling(options, limits, new_tokens, GENERATE_MAX_TOKENS, max(map(len, prompts)))
    options.refuse_rest()
    wants = body.boolean("return_logprob", False)
    start = body.integer("logprob_start_len", -1, low=-1)
    top = body.integer("top_logprobs_num", 0, low=0, high=MAX_TOP_LOGPROBS)
    stream, _ = _stream(body)
    if stream and batched:
        raise body.error("stream", "one prompt at a time can be streamed.")
    body.refuse_unless("token_ids_logprob", [], why="use top_logprobs_num")
    job = Job(
        prompts=prompts,
        sampling=sampling,
        top_logprobs=top if wants else None,
        prompt_logprob_start=start if wants and start is not None and start >= 0 else None,
        cache_salt=_salt(body),
        return_indexer_topk=body.boolean("return_indexer_topk", False),
        stream=stream,
        batched=batched,
    )
    body.refuse_rest()
    return job


def tokenize(raw: bytes, tokenizer: TextTokenizer, limits: Limits) -> dict[str, object]:
    """/tokenize: a prompt (one or several) as SGLang, or messages as vLLM."""
    body = Body(raw)
    body.take("model")
    if body.has("messages"):
        tokens = _encode_chat(body, tokenizer)
        body.take("add_special_tokens")
        answer: dict[str, object] = {"tokens": tokens, "count": len(tokens)}
    else:
        prompt = body.take("prompt")
        many = isinstance(prompt, list)
        if not all(isinstance(text, str) for text in (prompt if many else [prompt])):
            raise body.error("prompt", "expected a string or a list of strings, or messages instead.")
        bos = body.boolean("add_special_tokens", True)
        lists = [tokenizer.encode(text, bos=bos) for text in (prompt if many else [prompt])]
        answer = {
            "tokens": lists if many else lists[0],
            "count": [len(ids) for ids in lists] if many else len(lists[0]),
        }
    body.refuse_rest()
    return {**answer, "max_model_len": limits.context_length}


def detokenize(raw: bytes, tokenizer: TextTokenizer, limits: Limits) -> dict[str, object]:
    """/detokenize: {"tokens": [ids]} → {"text": …}."""
    body = Body(raw)
    body.take("model")
    tokens = body.take("tokens")
    return {"text": tokenizer.decode(body.token_ids("tokens", tokens, limits.vocab_size) if tokens != [] else [])}
