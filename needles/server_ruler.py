"""A ruler that asks a running server, for models whose chat encoder exists only there.

    ruler = ServerRuler("http://127.0.0.1:30000/v1", model="some-model")

Three ways are tried once, in this order: vLLM's `/tokenize` with messages, the same under `/v1`, and a completion of
one token whose `usage.prompt_tokens` is read. Lengths between measurements are estimated from the number of characters
(how many make a token is measured once), so sets come out as exact as with a local tokenizer but with a few requests
per prompt.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import httpx
import tokenizers

from longrecall.needles.filler import Prose
from longrecall.needles.render import Layout, Message, Ruler, RulerError, Span, continues

_TEMPLATE_TOKENS = 5


class ServerRuler(Ruler):
    """Counts prompts on the server; `additive` is False and token spans are unknown."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str = "none",
        template_args: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(
            tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
            "{% for message in messages %}{{ message['content'] }}{% endfor %}",
            tokenizer_hash="",
            template_args=template_args,
            source=base_url,
        )
        self.base_url = base_url.rstrip("/")
        self._client = httpx.Client(timeout=timeout_s, headers={"Authorization": f"Bearer {api_key}"})
        self.model = model or self._first_model()
        self.tokenizer_hash = self.template_hash = hashlib.sha256(f"{base_url} {self.model}".encode()).hexdigest()
        self._how: Callable[[Sequence[Message]], int | None] | None = None

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    @property
    def _root(self) -> str:
        return self.base_url.removesuffix("/v1")

    def _first_model(self) -> str:
        listed = self._call("GET", f"{self._root}/v1/models", None)
        try:
            return str(listed["data"][0]["id"])  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            raise RulerError(f"{self.base_url} lists no model at /v1/models; name it with --model") from None

    def _call(self, method: str, url: str, body: dict[str, Any] | None) -> dict[str, Any] | None:
        """The reply as JSON; None when the server does not know the route or refuses the body's form."""
        try:
            reply = self._client.request(method, url, json=body)
        except httpx.HTTPError as error:
            raise RulerError(f"no answer from {url}: {type(error).__name__}: {error}") from error
        if reply.status_code in (404, 405, 422, 501):
            return None
        if reply.status_code >= 400:
            raise RulerError(f"{url} answered {reply.status_code}: {reply.text[:300]}")
        try:
            parsed = reply.json()
        except ValueError as error:
            raise RulerError(f"{url} did not answer with JSON: {reply.text[:100]!r}") from error
        return parsed if isinstance(parsed, dict) else None

    def _body(self, messages: Sequence[Message]) -> dict[str, Any]:
        begun = continues(messages)
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": not begun,
            "continue_final_message": begun,
        }
        if self.template_args:
            body["chat_template_kwargs"] = self.template_args
        return body

    def _by_tokenize(self, url: str) -> Callable[[Sequence[Message]], int | None]:
        def count(messages: Sequence[Message]) -> int | None:
            reply = self._call("POST", url, self._body(messages))
            found = reply.get("count") if reply else None
            return found if isinstance(found, int) else None

        return count

    def _by_usage(self, messages: Sequence[Message]) -> int | None:
        body = self._body(messages) | {"max_tokens": 1, "temperature": 0}
        reply = self._call("POST", f"{self._root}/v1/chat/completions", body)
        found = (reply or {}).get("usage", {}).get("prompt_tokens")
        return found if isinstance(found, int) else None

    def prompt_tokens(self, messages: Sequence[Message]) -> int:
        if self._how is not None:
            found = self._how(messages)
            if found is None:
                raise RulerError(f"{self.base_url} stopped counting tokens")
            return found
        ways = (
            self._by_tokenize(f"{self._root}/tokenize"),
            self._by_tokenize(f"{self._root}/v1/tokenize"),
            self._by_usage,
        )
        for way in ways:
            try:
                found = way(messages)
            except RulerError:
                if way is ways[-1]:
                    raise
                continue  # a /tokenize that takes text alone answers 400 to messages
            if found is not None:
                self._how = way
                return found
        raise RulerError(f"{self.base_url} counts tokens neither at /tokenize nor in usage.prompt_tokens")

    # Estimates between measurements

    @cached_property
    def _characters_per_token(self) -> float:
        """In filler: about 4.2 under vocabularies of 100,000 entries and more, 1 under one of characters."""
        prose, rng = Prose(), random.Random(0)
        sample = " " + prose.paragraph(rng, 24)
        short, long = (
            self.prompt_tokens([{"role": "user", "content": text}]) for text in ("Go on.", "Go on." + sample)
        )
        return len(sample) / max(1, long - short)

    @property
    def additive(self) -> bool:
        return False

    @property
    def layout(self) -> Layout:
        gap = " " * int(_TEMPLATE_TOKENS * self._characters_per_token)
        roles = ("system", "user", "assistant", "tool")
        return Layout(
            opening=dict.fromkeys(roles, gap),
            between={(left, right): gap for left in roles for right in roles},
            closing=dict.fromkeys(roles, gap),
            begun=gap,
            exact=False,
        )

    def joins(self, text: str) -> bool:
        return bool(text)

    def chunks(self, text: str) -> list[str]:
        return [text]

    def count_chunk(self, chunk: str, *, first: bool = False) -> int:
        return max(1, round(len(chunk) / self._characters_per_token)) if chunk else 0

    def find(self, messages: Sequence[Message], place: int, text: str) -> Span | None:
        return None
