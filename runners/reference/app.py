"""HTTP routes of the reference build (starlette), between a socket and the engine.

OpenAI: /v1/chat/completions, /v1/completions, /v1/models. SGLang: /generate, /health, /health_generate, /server_info,
/model_info, /flush_cache, /tokenize, /detokenize. And /statistics, what the engine has done so far.
"""

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from longrecall.runners.reference import protocol
from longrecall.runners.reference.answers import Answers, usage
from longrecall.runners.reference.engine import Engine
from longrecall.runners.reference.protocol import ApiError, Job, Limits, encode_json
from longrecall.runners.reference.request import EngineStoppedError, Progress, QueueFullError, Request
from longrecall.runners.reference.sampling import Sampling
from longrecall.runners.reference.tokenizer import TemplateError

MAX_BODY_BYTES = 16 * 2**20
HEALTH_TIMEOUT_S = 60.0


def _reply(value: object, status: int = 200) -> Response:
    return Response(encode_json(value), status, media_type="application/json")


def _error(error: ApiError) -> Response:
    return _reply(error.body, error.status)


def _engine_error(error: Exception) -> ApiError:
    if isinstance(error, QueueFullError):
        return ApiError(503, str(error), kind="service_unavailable_error", code="queue_full")
    if isinstance(error, EngineStoppedError):
        return ApiError(503, str(error), kind="service_unavailable_error", code="stopping")
    return ApiError(500, f"the model failed: {type(error).__name__}: {error}", kind="internal_server_error")


async def _read_body(http: HttpRequest) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in http.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


class _Run:
    """The engine requests of one HTTP request, and their progress as it comes."""

    def __init__(self, engine: Engine, job: Job) -> None:
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Progress] | None] = asyncio.Queue()
        self._engine = engine

        def sink(index: int) -> Callable[[Progress], None]:
            def put(progress: Progress) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                    loop.call_soon_threadsafe(self._events.put_nowait, (index, progress))

            return put

        self.requests = [
            Request(
                token_ids=tokens,
                sampling=job.sampling,
                top_logprobs=job.top_logprobs,
                prompt_logprob_start=job.prompt_logprob_start,
                cache_salt=job.cache_salt,
                return_indexer_topk=job.return_indexer_topk,
                stream=job.stream,
                sink=sink(i),
            )
            for i, tokens in enumerate(job.prompts)
        ]

    def submit(self) -> None:
        try:
            for request in self.requests:
                self._engine.submit(request)
        except (QueueFullError, EngineStoppedError) as error:
            self.cancel()
            raise _engine_error(error) from error

    def cancel(self) -> None:
        for request in self.requests:
            request.cancelled = True

    async def _watch(self, http: HttpRequest) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait(None)

    async def progress(self, http: HttpRequest) -> AsyncIterator[tuple[int, Progress]]:
        """Progress of all requests until each has finished; ends early, cancelling them, when the client goes away."""
        watcher = asyncio.create_task(self._watch(http))
        left = len(self.requests)
        try:
            while left:
                event = await self._events.get()
                if event is None:
                    raise ClientDisconnect
                if event[1].error is not None:
                    raise _engine_error(event[1].error)
                left -= event[1].finished
                yield event
        finally:
            watcher.cancel()
            if left:
                self.cancel()


class Api:
    """The routes of one engine."""

    def __init__(self, engine: Engine, limits: Limits, info: Callable[[], Mapping[str, object]]) -> None:
        self.engine = engine
        self.limits = limits
        self.info = info
        self.answers = Answers(engine.tokenizer)
        self.created = int(time.time())

    def app(self) -> Starlette:
        def post(path: str, reader: Callable[..., Job], whole: Any, stream: Any) -> Route:
            async def endpoint(http: HttpRequest) -> Response:
                return await self._serve(http, reader, whole, stream)

            return Route(path, endpoint, methods=["POST"])

        return Starlette(
            routes=[
                post("/v1/chat/completions", protocol.read_chat, self._chat, self._chat_stream),
                post("/v1/completions", protocol.read_completion, self._completion, self._completion_stream),
                post("/generate", protocol.read_generate, self._generate, self._generate_stream),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/health", self._health),
                Route("/health_generate", self._health_generate),
                Route("/server_info", self._server_info),
                Route("/model_info", self._model_info),
                Route("/statistics", self._statistics),
                Route("/flush_cache", self._flush_cache, methods=["GET", "POST"]),
                Route("/tokenize", self._text_route(protocol.tokenize), methods=["POST"]),
                Route("/detokenize", self._text_route(protocol.detokenize), methods=["POST"]),
            ],
            exception_handlers={
                ApiError: lambda _, error: _error(error),
                HTTPException: self._http_error,  # type: ignore[dict-item]
                ClientDisconnect: lambda *_: Response(status_code=499),  # nobody reads it
            },
        )

    @staticmethod
    async def _http_error(http: HttpRequest, error: HTTPException) -> Response:
        message = f"Invalid URL ({http.method} {http.url.path})" if error.status_code == 404 else error.detail
        reply = _error(ApiError(error.status_code, message))
        reply.headers.update(error.headers or {})
        return reply

    async def _serve(self, http: HttpRequest, reader: Callable[..., Job], whole: Any, stream: Any) -> Response:
        self.engine.arriving += 1  # an idle engine waits a moment for what is on its way
        try:
            raw = await _read_body(http)
            try:
                job = reader(raw, self.engine.tokenizer, self.limits)
            except TemplateError as error:
                raise ApiError(400, str(error), param="messages") from error
            run = _Run(self.engine, job)
            run.submit()
        finally:
            self.engine.arriving -= 1
        if job.stream:
            return StreamingResponse(
                self._events(http, run, stream(job, run)),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache"},
            )
        async for _ in run.progress(http):
            pass
        return _reply(whole(job, run.requests))

    async def _events(
        self, http: HttpRequest, run: _Run, chunks: Callable[[Progress | None], list[dict[str, object]]]
    ) -> AsyncIterator[bytes]:
        """Server-sent events. An error after the headers is an event too; the stream then ends without [DONE]."""
        progress = run.progress(http)
        try:
            async for _, step in progress:
                for chunk in chunks(step):
                    yield b"data: " + encode_json(chunk) + b"\n\n"
            for chunk in chunks(None):
                yield b"data: " + encode_json(chunk) + b"\n\n"
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield b"data: " + encode_json(error.body) + b"\n\n"
        except ClientDisconnect:
            return
        finally:
            await progress.aclose()  # type: ignore[attr-defined]

    def _head(self, prefix: str, kind: str) -> dict[str, object]:
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.limits.model_name,
        }

    def _chat(self, job: Job, requests: Sequence[Request]) -> dict[str, object]:
        (request,) = requests
        logprobs = self.answers.chat_logprobs(request.output_logprobs) if job.top_logprobs is not None else None
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": request.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": request.finish_reason,
            "matched_stop": request.matched_stop,
        }
        return {**self._head("chatcmpl", "chat.completion"), "choices": [choice], "usage": usage(requests)}

    def _chat_stream(self, job: Job, run: _Run) -> Callable[[Progress | None], list[dict[str, object]]]:
        head = self._head("chatcmpl", "chat.completion.chunk")
        (request,) = run.requests
        first = True

        def chunk(delta: dict[str, object], logprobs: object = None, reason: str | None = None) -> dict[str, object]:
            choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return {**head, "choices": [choice], **({"usage": None} if job.include_usage else {})}

        def chunks(progress: Progress | None) -> list[dict[str, object]]:
            nonlocal first
            if progress is None:
                return [{**head, "choices": [], "usage": usage(run.requests)}] if job.include_usage else []
            made = [chunk({"role": "assistant", "content": ""})] if first else []
            first = False
            logprobs = self.answers.chat_logprobs(progress.tokens) if job.top_logprobs is not None else None
            if progress.text or progress.tokens:
                made.append(chunk({"content": progress.text}, logprobs))
            if progress.finished:
                made.append(chunk({}, None, request.finish_reason))
            return made

        return chunks

    def _completion(self, job: Job, requests: Sequence[Request]) -> dict[str, object]:
        choices = []
        for i, request in enumerate(requests):
            tokens = [*(self.answers.echoed(request) if job.echo else ()), *request.output_logprobs]
            choices.append(
                {
                    "index": i,
                    "text": (self.engine.tokenizer.decode(request.token_ids) if job.echo else "") + request.text,
                    "logprobs": self.answers.completion_logprobs(tokens) if job.top_logprobs is not None else None,
                    "finish_reason": request.finish_reason,
                    "matched_stop": request.matched_stop,
                }
            )
        return {**self._head("cmpl", "text_completion"), "choices": choices, "usage": usage(requests)}

    def _completion_stream(self, job: Job, run: _Run) -> Callable[[Progress | None], list[dict[str, object]]]:
        head = self._head("cmpl", "text_completion")
        (request,) = run.requests
        offset = 0
        first = True

        def chunk(text: str, tokens: Sequence[Any], reason: str | None) -> dict[str, object]:
            nonlocal offset
            logprobs = None
            if job.top_logprobs is not None:
                logprobs = self.answers.completion_logprobs(tokens, offset=offset)
            offset += len(text)
            choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}
            return {**head, "choices": [choice], **({"usage": None} if job.include_usage else {})}

        def chunks(progress: Progress | None) -> list[dict[str, object]]:
            nonlocal first
            if progress is None:
                return [{**head, "choices": [], "usage": usage(run.requests)}] if job.include_usage else []
            made = []
            if first and job.echo:
                made.append(chunk(self.engine.tokenizer.decode(request.token_ids), self.answers.echoed(request), None))
            first = False
            made.append(chunk(progress.text, progress.tokens, request.finish_reason if progress.finished else None))
            return made

        return chunks

    def _generate(self, job: Job, requests: Sequence[Request]) -> object:
        replies = [self.answers.generated(request, job, request_id=uuid.uuid4().hex) for request in requests]
        return replies if job.batched else replies[0]

    def _generate_stream(self, job: Job, run: _Run) -> Callable[[Progress | None], list[dict[str, object]]]:
        request_id = uuid.uuid4().hex

        def chunks(progress: Progress | None) -> list[dict[str, object]]:
            # as SGLang, each event holds the whole text so far
            return [] if progress is None else [self.answers.generated(run.requests[0], job, request_id=request_id)]

        return chunks

    def _model_card(self) -> dict[str, object]:
        return {
            "id": self.limits.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "longrecall",
            "root": self.limits.model_name,
            "max_model_len": self.limits.context_length,
        }

    async def _models(self, http: HttpRequest) -> Response:
        return _reply({"object": "list", "data": [self._model_card()]})

    async def _model(self, http: HttpRequest) -> Response:
        name = http.path_params["model"]
        if name != self.limits.model_name:
            raise ApiError(404, f"The model {name!r} does not exist", param="model", code="model_not_found")
        return _reply(self._model_card())

    async def _health(self, http: HttpRequest) -> Response:
        return Response(status_code=200 if self.engine.alive else 503)

    async def _health_generate(self, http: HttpRequest) -> Response:
        """One token from the model, with a salt of its own so that it leaves no prefix behind for others."""
        job = Job(
            prompts=[[self.engine.tokenizer.bos_id]],
            sampling=Sampling(temperature=0.0, max_tokens=1, ignore_eos=True),
            top_logprobs=None,
            prompt_logprob_start=None,
            cache_salt="health",
            stream=False,
        )
        run = _Run(self.engine, job)
        run.submit()
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                async for _ in run.progress(http):
                    pass
        except TimeoutError as error:
            raise ApiError(503, "no token came", kind="service_unavailable_error") from error
        return Response(status_code=200)

    async def _server_info(self, http: HttpRequest) -> Response:
        return _reply(self.info())

    async def _model_info(self, http: HttpRequest) -> Response:
        info = self.info()
        return _reply({"model_path": info["model_path"], "tokenizer_path": info["model_path"], "is_generation": True})

    async def _statistics(self, http: HttpRequest) -> Response:
        cache = self.engine.prefix_cache
        return _reply(
            {
                **dataclasses.asdict(self.engine.counters),
                "num_requests": self.engine.num_requests,
                "prefix_cache_sequences": len(cache),
                "prefix_cache_bytes": cache.nbytes,
                "prefix_cache_evicted": cache.num_evicted,
            }
        )

    async def _flush_cache(self, http: HttpRequest) -> Response:
        """400 while requests are being served, as SGLang; `?timeout=` waits that many seconds for them to end."""
        try:
            deadline = time.monotonic() + min(max(float(http.query_params.get("timeout", "0")), 0.0), 600.0)
        except ValueError as error:
            raise ApiError(400, "timeout must be a number of seconds", param="timeout") from error
        loop = asyncio.get_running_loop()
        while True:
            done: asyncio.Future[bool] = loop.create_future()

            def flushed(ok: bool, done: asyncio.Future[bool] = done) -> None:
                loop.call_soon_threadsafe(done.set_result, ok)

            self.engine.flush_cache(flushed)
            if await done:
                return Response("Cache flushed.\n", media_type="text/plain")
            if time.monotonic() >= deadline:
                message = f"cannot flush the cache: {self.engine.num_requests} requests are being served"
                raise ApiError(400, message, code="busy")
            await asyncio.sleep(0.01)

    def _text_route(self, answer: Callable[..., dict[str, object]]) -> Any:
        async def endpoint(http: HttpRequest) -> Response:
            try:
                return _reply(answer(await _read_body(http), self.engine.tokenizer, self.limits))
            except TemplateError as error:
                raise ApiError(400, str(error), param="messages") from error

        return endpoint
