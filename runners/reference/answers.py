"""Replies of the OpenAI and SGLang routes, built from finished or growing requests."""

import base64
import math
from collections.abc import Sequence

from longrecall.runners.reference.protocol import Job
from longrecall.runners.reference.request import Request
from longrecall.runners.reference.sampling import TokenLogprob
from longrecall.runners.reference.tokenizer import TextTokenizer

LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot hold


def usage(requests: Sequence[Request]) -> dict[str, object]:
    """OpenAI's usage, summed over the prompts of one HTTP request."""
    prompt = sum(len(request.token_ids) for request in requests)
    completion = sum(len(request.output_ids) for request in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in requests)},
    }


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


class Answers:
    """Builds the replies of one served model."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def _token(self, token_id: int, logprob: float) -> dict[str, object]:
        return {
            "token": self._tokenizer.piece(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def chat_logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, object]:
        content = []
        for token in tokens:
            assert token.logprob is not None
            top = [self._token(token_id, logprob) for token_id, logprob in token.top]
            content.append({**self._token(token.token_id, token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion_logprobs(self, tokens: Sequence[TokenLogprob], *, offset: int = 0) -> dict[str, object]:
        """The legacy shape; equal texts of different tokens share one key of top_logprobs, the likelier winning."""
        texts: list[str] = []
        offsets: list[int] = []
        tops: list[dict[str, float] | None] = []
        for token in tokens:
            texts.append(self._tokenizer.piece(token.token_id))
            offsets.append(offset)
            offset += len(self._tokenizer.decode([token.token_id]))
            if token.logprob is None:
                tops.append(None)
                continue
            top: dict[str, float] = {}
            for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
                top.setdefault(self._tokenizer.piece(token_id), finite(logprob))
            tops.append(top)
        values = [None if token.logprob is None else finite(token.logprob) for token in tokens]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def echoed(self, request: Request) -> list[TokenLogprob]:
        """All prompt tokens, those before the asked start without a logprob."""
        missing = len(request.token_ids) - len(request.prompt_logprobs)
        return [*(TokenLogprob(i, None, ()) for i in request.token_ids[:missing]), *request.prompt_logprobs]

    def generated(self, request: Request, job: Job, *, request_id: str) -> dict[str, object]:
        """SGLang's reply, for the text so far."""

        def triple(token: TokenLogprob) -> list[object]:
            return [None if token.logprob is None else finite(token.logprob), token.token_id, None]

        def tops(tokens: Sequence[TokenLogprob]) -> list[object]:
            return [[[finite(p), i, None] for i, p in token.top] or None for token in tokens]

        reason: dict[str, object] | None = None
        if request.finish_reason == "length":
            reason = {"type": "length", "length": job.sampling.max_tokens}
        elif request.finish_reason is not None:
            reason = {"type": request.finish_reason, "matched": request.matched_stop}
        meta: dict[str, object] = {
            "id": request_id,
            "finish_reason": reason,
            "prompt_tokens": len(request.token_ids),
            "completion_tokens": len(request.output_ids),
            "cached_tokens": request.cached_tokens,
        }
        if request.finished_s is not None:
            meta["e2e_latency"] = request.finished_s - request.received_s
        if job.top_logprobs is not None:
            meta["input_token_logprobs"] = [triple(token) for token in request.prompt_logprobs]
            meta["output_token_logprobs"] = [triple(token) for token in request.output_logprobs]
            if job.top_logprobs:
                meta["input_top_logprobs"] = tops(request.prompt_logprobs)
                meta["output_top_logprobs"] = tops(request.output_logprobs)
        if request.indexer_topk is not None:
            # little-endian int32, C order: np.frombuffer(base64.b64decode(x), np.int32).reshape(seqlen - 1, layers, -1)
            meta["indexer_topk"] = base64.b64encode(request.indexer_topk.astype("<i4").tobytes()).decode("ascii")
        return {"text": request.text, "output_ids": list(request.output_ids), "meta_info": meta}
