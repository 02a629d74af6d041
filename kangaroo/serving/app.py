"""The HTTP server: OpenAI's routes over a scheduler."""

import asyncio
import hmac
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from kangaroo.engine.constraint import Restrictions
from kangaroo.engine.requests import Request as TextRequest
from kangaroo.engine.sampling import Sampling
from kangaroo.models.prompts import Message, Tokenizer, prompt_ids, text_ids
from kangaroo.serving.answers import Answer, error_response, server_sent_event
from kangaroo.serving.metrics import Metrics
from kangaroo.serving.protocol import MOST_LOGPROBS, Chat, Completion, StreamOptions
from kangaroo.serving.scheduler import CANCELLED, FAILED, STOPPED, TIMEOUT, Scheduler
from kangaroo.serving.serve import ServeConfig
from kangaroo.utils.errors import KangarooError, naming

PAGE = Path(__file__).with_name("page.html")  # a chat page
DEFAULT_TOKENS = 512  # where a request sets no limit
FAILURES = {  # status and message, by how a job ended
    FAILED: (500, "decoding has failed for this request; see the server's log."),
    STOPPED: (503, "decoding has failed; see the server's log."),
    TIMEOUT: (503, "the answer took too long."),
    CANCELLED: (503, "the server is shutting down."),
}
LONGEST_VALUE = 40  # characters of a value that an error repeats
GONE = 499  # for metrics: the client has disconnected
CODES = {404: "unknown_url", 405: "method_not_supported"}  # OpenAI's, by status
UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def explain(request: Request, error: Exception) -> Response:
    """The response to an exception; the log has the traceback of an unexpected one."""
    if isinstance(error, KangarooError):
        return error_response(getattr(error, "status", 400), str(error))
    if isinstance(error, RequestValidationError):
        return error_response(400, field_errors(error, request.headers.get("content-type")))
    if isinstance(error, HTTPException):
        code = CODES.get(error.status_code)
        route = f"{request.method} {request.url.path}: " if code else ""
        detail = error.detail
        if error.__cause__ is not None:  # a wrong byte, too many digits, lists in too many lists
            detail = f"the body is not JSON: {str(error.__cause__).partition(';')[0]}"
        return error_response(error.status_code, route + detail, code)
    return error_response(500, f"the server has failed ({type(error).__name__}); see its log.")


def field_errors(error: RequestValidationError, content_type: str | None) -> str:
    """The errors of a request's body, each with its field, and its value if that is short."""
    if isinstance(error.body, bytes):  # not read as JSON
        sent = f"; '{content_type}' was sent" if content_type else ""
        return f"the header 'Content-Type: application/json' is missing{sent}."
    messages = []
    for fault in error.errors()[:8]:
        # for a union, pydantic adds the types to the location, some with their validators
        names = (str(part) for part in fault["loc"][1:])
        field = ".".join(name for name in names if "[" not in name)
        message = fault["msg"].removeprefix("Value error, ")
        value = fault["input"]
        shown = json.dumps(value) if isinstance(value, int | float | str) else ""
        if fault["type"] == "extra_forbidden":
            message = "there is no such field here; leave it out"
        if fault["type"] == "json_invalid":
            message = f"the body is not JSON: {fault['ctx']['error']} (at {field})"
            field = ""
        elif not field and fault["type"] != "value_error":
            field = "the body"
        if field and 0 < len(shown) <= LONGEST_VALUE:
            field = f"{field}={shown}"
        messages.append(f"{field}: {message}" if field else message)
    return "; ".join(dict.fromkeys(messages))


@dataclass
class Server:
    """The routes and their state; `model` and `drafter` are names."""

    scheduler: Scheduler
    tokenizer: Tokenizer
    model: str
    drafter: str
    limits: ServeConfig

    def __post_init__(self) -> None:
        self.metrics = Metrics()
        engine = self.scheduler.engine
        vocab_size = engine.lm.config.vocab_size
        self.restrictions = Restrictions(self.tokenizer, vocab_size, engine.eos_ids)
        self.created = int(time.time())

    def app(self) -> FastAPI:
        """The ASGI application; when it shuts down, running texts are finished."""

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.scheduler.close, self.limits.grace)

        errors = KangarooError, RequestValidationError, HTTPException, Exception
        handlers: dict[Any, Any] = dict.fromkeys(errors, explain)
        app = FastAPI(lifespan=lifespan, exception_handlers=handlers, docs_url=None, redoc_url=None)
        app.add_middleware(Guard, limits=self.limits, metrics=self.metrics)
        app.post("/v1/completions")(self.completions)
        app.post("/v1/chat/completions")(self.chat)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.models)
        app.get("/health")(self.health)
        app.get("/metrics")(self.show_metrics)
        app.get("/")(lambda: FileResponse(PAGE))
        return app

    async def health(self) -> Response:
        """Whether the server decodes, and its load."""
        if not self.scheduler.accepts:
            return error_response(503, self.scheduler.failure or "the server is shutting down.")
        return JSONResponse({"status": "ok", **self.scheduler.load})

    async def show_metrics(self) -> Response:
        """The metrics for Prometheus."""
        return Response(self.metrics.as_text(self.scheduler.load), media_type=CONTENT_TYPE_LATEST)

    async def models(self, name: str | None = None) -> Response:
        """The served model, by its name or in a list."""
        model = {"id": self.model, "object": "model", "created": self.created}
        model |= {"owned_by": "kangaroo", "drafter": self.drafter}
        model |= {"max_model_len": self.scheduler.max_model_len}
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        return JSONResponse(model) if name == self.model else self._no_model(name)

    def _no_model(self, name: str) -> Response:
        message = f"there is no model '{name}'; this is '{self.model}'."
        return error_response(404, message, "model_not_found")

    async def completions(self, body: Completion, request: Request) -> Response:
        """Continue a prompt."""
        prompts = [
            await asyncio.to_thread(text_ids, self.tokenizer, x) if isinstance(x, str) else x
            for x in body.prompt
        ]
        return await self._answer(body, prompts, body.max_tokens, request)

    async def chat(self, body: Chat, request: Request) -> Response:
        """Write the next turn of a conversation."""
        roles = {"developer": "system"}
        turns = [Message(role=roles.get(m.role, m.role), content=m.text) for m in body.messages]
        prompt = await asyncio.to_thread(prompt_ids, self.tokenizer, turns)
        limit = body.max_completion_tokens or body.max_tokens
        return await self._answer(body, [prompt], limit, request)

    async def _answer(
        self, body: Completion | Chat, prompts: list[list[int]], limit: int | None, request: Request
    ) -> Response:
        if body.model is not None and body.model != self.model:
            return self._no_model(body.model)
        seed = secrets.randbits(31) if body.seed is None else body.seed
        sampling = Sampling(body.temperature, body.top_p, body.top_k)
        schema = body.response_format.schema_of_answer
        constraint = await asyncio.to_thread(self.restrictions.of, body.logit_bias, schema)
        requests = list[TextRequest]()
        for number, prompt in enumerate(prompts):
            room = max(1, min(DEFAULT_TOKENS, self.scheduler.max_model_len - len(prompt)))
            first = TextRequest(
                prompt,
                limit or room,
                seed=seed,
                stop=body.stop,
                ignore_eos=body.ignore_eos,
                sampling=sampling,
                constraint=constraint,
                drafts=body.drafts,
                keep=0 if body.shown_logprobs is None else MOST_LOGPROBS,
            )
            with naming(f"prompt.{number}") if len(prompts) > 1 else nullcontext():
                self.scheduler.check(first)
            requests += [replace(first, seed=seed + i) for i in range(body.n)]
        answer = Answer(
            self.scheduler,
            self.tokenizer,
            requests,
            n=body.n,
            deadline=time.monotonic() + (self.limits.timeout or math.inf),
            metrics=self.metrics,
            model=self.model,
            is_chat=isinstance(body, Chat),
            logprobs=body.shown_logprobs,
        )
        if body.stream:
            return EventStream(answer, body.stream_options or StreamOptions())
        return await full_response(answer, request)


class EventStream(StreamingResponse):
    """An answer as server-sent events. Decoding ends when the client disconnects."""

    def __init__(self, answer: Answer, options: StreamOptions):
        content = events(answer, options)
        super().__init__(content, media_type="text/event-stream", headers=UNBUFFERED)
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.end()


async def events(answer: Answer, options: StreamOptions) -> AsyncIterator[str]:
    """The server-sent events of an answer; if it fails, the last one is the error."""
    with_usage = options.include_usage and options.continuous_usage_stats
    async for choice, text, drafted in answer.steps():
        if choice.finish in FAILURES:
            error = error_response(*FAILURES[choice.finish])
            yield server_sent_event(json.loads(bytes(error.body)))
            return
        yield server_sent_event(answer.as_json([answer.part(choice, text, drafted)], with_usage))
    if options.include_usage:
        yield server_sent_event(answer.as_json([], with_usage=True))
    yield "data: [DONE]\n\n"


async def full_response(answer: Answer, request: Request) -> Response:
    """The full answer. Decoding ends when the client disconnects."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        answer.cancel()

    watcher = asyncio.create_task(watch())
    try:
        async for _ in answer.steps():
            pass
    finally:
        watcher.cancel()
        answer.end()
    if watcher.done():
        return Response(status_code=GONE)
    for choice in answer.choices:
        if choice.finish in FAILURES:
            return error_response(*FAILURES[choice.finish])
    return JSONResponse(answer.full())


class Guard:
    """Middleware that checks hosts, keys and sizes of requests, and counts responses. It is plain
    ASGI, to count the bytes of a body as they arrive."""

    def __init__(self, app: ASGIApp, limits: ServeConfig, metrics: Metrics):
        self.app = app
        self.limits = limits
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0
        started = False

        async def counted_receive() -> MutableMapping[str, Any]:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limits.most_bytes:  # routes let this pass
                raise HTTPException(413, f"a request has at most {self.limits.most_bytes} bytes.")
            return message

        async def counted_send(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self.metrics.requests.labels(str(message["status"])).inc()
            await send(message)

        is_http = scope["type"] == "http"
        refusal = self._refusal(Headers(scope=scope), scope["path"]) if is_http else None
        try:
            await (refusal or self.app)(scope, counted_receive, counted_send)
        except asyncio.CancelledError:
            if not started:  # uvicorn ends what is unfinished `grace` seconds after a stop
                await error_response(*FAILURES[CANCELLED])(scope, receive, counted_send)
        except Exception:  # the outermost middleware responds
            self.metrics.requests.labels("500").inc()
            raise

    def _refusal(self, headers: Headers, path: str) -> Response | None:
        host = headers.get("host")  # HTTP/1.0 may leave it out, and no browser does
        names = ["localhost", self.limits.host, *self.limits.allowed_hosts]
        if host is not None and not is_allowed(host, names):
            return error_response(
                400,
                f"this server is not called '{host}', as the header Host says. Ask for localhost "
                "or its address, or have it started with allowed_hosts=[NAME].",
            )
        encoding = headers.get("content-encoding", "identity")
        if encoding != "identity":
            return error_response(
                400, f"the body is compressed (Content-Encoding: {encoding}); send it as it is."
            )
        sent = headers.get("authorization", "").removeprefix("Bearer ").encode()
        needs_key = self.limits.api_key is not None and path.startswith("/v1/")
        if needs_key and not hmac.compare_digest(sent, str(self.limits.api_key).encode()):
            return error_response(401, "send the server's key: 'Authorization: Bearer KEY'.")
        return None


def is_allowed(host: str, names: Sequence[str]) -> bool:
    """Whether a Host header is an IP address, which no DNS can redirect, or matches a pattern.
    (starlette's `TrustedHostMiddleware` would need every address listed.)"""
    try:
        name = urlsplit(f"//{host}").hostname or ""  # without port and brackets, in small letters
        return any(fnmatchcase(name, x.lower()) for x in names) or bool(ip_address(name))
    except ValueError:
        return False
