"""Log-probabilities of the right answer, forced after a prompt that was just asked.

One more request per reply, over a prompt that is in the prefix cache: what it costs is the answer's few tokens. Two
routes can do it: SGLang's /generate (`generate`), and /v1/completions with echo (`completions`, vLLM). An engine with
neither is refused the option; nothing is guessed. A request that fails leaves the answer without log-probabilities and
is counted in `problems`.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import openai

from longrecall.needles.schema import Probe
from longrecall.runners.client import Endpoint
from longrecall.runners.prompts import Messages
from longrecall.runners.schema import Response

Route = Literal["generate", "completions"]


@dataclass(kw_only=True)
class GoldScorer:
    """Asks for the log-probabilities of gold answers."""

    route: Route
    encode: Callable[[Sequence[Mapping[str, str]]], list[int]]
    """Token ids of a prompt, whose last message may be a begun assistant turn."""
    problems: Counter[str] = field(default_factory=Counter)

    async def scored(
        self, endpoint: Endpoint, response: Response, messages: Messages, probe: Probe, salt: str | None
    ) -> Response:
        """`response` with the log-probabilities of the probe's gold answer, where they could be had."""
        ids, start = self.forced(messages, probe)
        try:
            async with asyncio.timeout(endpoint.timeout_s):
                values = await self._asked(endpoint, ids, start, salt)
        except (TimeoutError, openai.OpenAIError, ValueError, LookupError, TypeError) as problem:
            self.problems[f"{type(problem).__name__}: {problem}"[:200]] += 1
            return response
        return replace(response, gold_logprobs=values)

    def forced(self, messages: Messages, probe: Probe) -> tuple[list[int], int]:
        """The prompt with the gold answer behind it, and where the answer's tokens begin."""
        prompt = self.encode(messages)
        if messages[-1]["role"] == "assistant":
            whole = [*messages[:-1], {"role": "assistant", "content": f"{messages[-1]['content']} {probe.gold}"}]
        else:
            whole = [*messages, {"role": "assistant", "content": probe.gold}]
        ids = self.encode(whole)
        start = 0
        while start < min(len(prompt), len(ids)) and prompt[start] == ids[start]:
            start += 1
        return ids, start

    async def _asked(self, endpoint: Endpoint, ids: list[int], start: int, salt: str | None) -> tuple[float, ...]:
        salted = {"cache_salt": salt} if salt is not None else {}
        body: dict[str, Any]
        if self.route == "generate":
            body = {
                "input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 1}, "return_logprob": True,
                "logprob_start_len": start - 1, **salted,
            }  # fmt: skip
            said = json.loads(await endpoint.client.post(f"{endpoint.root}/generate", cast_to=bytes, body=body))
            entries = said["meta_info"]["input_token_logprobs"][-(len(ids) - start) :]
            if [entry[1] for entry in entries] != ids[start:]:
                raise ValueError("the tokens that came back are not the answer's")
            return _known([entry[0] for entry in entries])
        body = {
            "model": endpoint.model, "prompt": ids, "temperature": 0, "max_tokens": 1, "echo": True, "logprobs": 0,
            **salted,
        }  # fmt: skip
        said = json.loads(await endpoint.client.post("/completions", cast_to=bytes, body=body))
        values = said["choices"][0]["logprobs"]["token_logprobs"]
        # The prompt's tokens, and the one generated.
        if len(values) not in (len(ids), len(ids) + 1):
            raise ValueError(f"{len(values)} log-probabilities for {len(ids)} tokens: the prompt was not echoed")
        return _known(values[start : len(ids)])


def _known(values: list[Any]) -> tuple[float, ...]:
    if not values or not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ValueError(f"log-probabilities {values!r}"[:120])
    return tuple(float(value) for value in values)
