"""The HTTP side: OpenAI's routes over a scheduler."""

import asyncio
import hmac
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import asynccontextmanager
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

from kangaroo.engine.requests import Request as TextRequest
from kangaroo.engine.sampling import Sampling
from kangaroo.models.prompts import Message, Tokenizer, prompt_ids
from kangaroo.serving.answers import Answer, event, problem
from kangaroo.serving.metrics import Metrics
from kangaroo.serving.protocol import Chat, Completion, StreamOptions
from kangaroo.serving.scheduler import CANCELLED, FAILED, STOPPED, TIMEOUT, Scheduler
from kangaroo.serving.serve import ServeConfig
from kangaroo.utils.errors import KangarooError

PAGE = Path(__file__).with_name("page.html")  # to try it with
DEFAULT_TOKENS = 512  # of an answer that is not limited by its request
FAULTS = {  # how a job ends without its text
    FAILED: (500, "decoding has failed for this request; see the server's log."),
    STOPPED: (503, "decoding has failed; see the server's log."),
    TIMEOUT: (503, "the answer took too long."),
    CANCELLED: (503, "the server is shutting down."),
}
CODES = {404: "unknown_url", 405: "method_not_supported"}  # of paths and methods
UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def explained(request: Request, error: Exception) -> Response:
    """What a client reads of an error: of ours, of a body that is not what the route takes, of a
    path or a method that there is not; and of a fault of the server's own, which its log shows."""
    if isinstance(error, KangarooError):
        return problem(getattr(error, "status", 400), str(error))
    if isinstance(error, RequestValidationError):
        return problem(400, faults(error, request.headers.get("content-type")))
    if isinstance(error, HTTPException):
        code = CODES.get(error.status_code)
        where = f"{request.method} {request.url.path}: " if code else ""
        return problem(error.status_code, where + error.detail, code)
    return problem(500, f"the server has failed ({type(error).__name__}); see its log.")


def faults(error: RequestValidationError, content_type: str | None) -> str:
    """Every fault of a body by its place."""
    if isinstance(error.body, bytes):  # not read as JSON
        sent = f"; '{content_type}' was sent" if content_type else ""
        return f"the header 'Content-Type: application/json' is missing{sent}."
    messages = []
    for fault in error.errors()[:8]:
        # of a field of several types pydantic names each, some by their validators
        names = (str(part) for part in fault["loc"][1:])
        where = ".".join(name for name in names if "[" not in name)
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "json_invalid":
            where, message = "", f"the body is not JSON: {fault['ctx']['error']} (at {where})"
        elif not where and fault["type"] != "value_error":
            where = "the body"
        messages.append(f"{where}: {message}" if where else message)
    return "; ".join(dict.fromkeys(messages))


@dataclass
class Server:
    """The routes, and what they share; `model` and `drafter` are names."""

    scheduler: Scheduler
    tokenizer: Tokenizer
    model: str
    drafter: str
    limits: ServeConfig

    def __post_init__(self) -> None:
        self.metrics, self.begun = Metrics(), int(time.time())

    def app(self) -> FastAPI:
        """What uvicorn runs; when that stops, running texts are finished."""

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.scheduler.close, self.limits.grace)

        errors = KangarooError, RequestValidationError, HTTPException, Exception
        handlers: dict[Any, Any] = dict.fromkeys(errors, explained)
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
        """Whether requests are decoded."""
        if not self.scheduler.alive:
            return problem(503, self.scheduler.failure or "the server is shutting down.")
        return JSONResponse({"status": "ok", **self.scheduler.load})

    async def show_metrics(self) -> Response:
        """For Prometheus."""
        return Response(self.metrics.show(self.scheduler.load), media_type=CONTENT_TYPE_LATEST)

    async def models(self, name: str | None = None) -> Response:
        """The one model by its name, or in a list."""
        model = {"id": self.model, "object": "model", "created": self.begun, "owned_by": "kangaroo"}
        model |= {"drafter": self.drafter, "max_model_len": self.scheduler.max_model_len}
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        return JSONResponse(model) if name == self.model else self._no_model(name)

    def _no_model(self, name: str) -> Response:
        message = f"there is no model '{name}'; this is '{self.model}'."
        return problem(404, message, "model_not_found")

    async def completions(self, body: Completion, request: Request) -> Response:
        """Text that goes on from a prompt."""
        prompt = body.prompt
        if isinstance(prompt, str):
            prompt = (await asyncio.to_thread(self.tokenizer, prompt)).input_ids
        return await self._answer(body, prompt, body.max_tokens, request)

    async def chat(self, body: Chat, request: Request) -> Response:
        """The next turn of a conversation."""
        roles = {"developer": "system"}
        turns = [Message(role=roles.get(m.role, m.role), content=m.text) for m in body.messages]
        prompt = await asyncio.to_thread(prompt_ids, self.tokenizer, turns)
        limit = body.max_completion_tokens or body.max_tokens
        return await self._answer(body, prompt, limit, request)

    async def _answer(
        self, body: Completion | Chat, prompt: list[int], limit: int | None, request: Request
    ) -> Response:
        if body.model is not None and body.model != self.model:
            return self._no_model(body.model)
        room = self.scheduler.max_model_len - len(prompt)
        new_tokens = limit or max(1, min(DEFAULT_TOKENS, room))
        seed = secrets.randbits(31) if body.seed is None else body.seed
        sampling = Sampling(body.temperature, body.top_p, body.top_k)
        text = TextRequest(prompt, new_tokens, seed, body.stop, body.ignore_eos, sampling)
        self.scheduler.check(text)
        requests = [replace(text, seed=seed + i) for i in range(body.n)]
        deadline = time.monotonic() + (self.limits.timeout or math.inf)
        form = self.model, isinstance(body, Chat)
        answer = Answer(self.scheduler, self.tokenizer, requests, deadline, self.metrics, *form)
        if body.stream:
            return Streamed(answer, body.stream_options or StreamOptions())
        return await whole(answer, request)


class Streamed(StreamingResponse):
    """Server-sent events; when the client has all of them or goes away, the texts end."""

    def __init__(self, answer: Answer, options: StreamOptions):
        parts = events(answer, options)
        super().__init__(parts, media_type="text/event-stream", headers=UNBUFFERED)
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.end()


async def events(answer: Answer, options: StreamOptions) -> AsyncIterator[str]:
    """The answer as server-sent events."""
    counted = options.include_usage and options.continuous_usage_stats
    async for choice, text, drafted in answer.steps():
        if choice.finish in FAULTS:
            yield event(json.loads(bytes(problem(*FAULTS[choice.finish]).body)))
            return
        yield event(answer.part(choice, text, drafted, counted))
    if options.include_usage:
        yield event(answer.chunk([], counted=True))
    yield "data: [DONE]\n\n"


async def whole(answer: Answer, request: Request) -> Response:
    """All texts at once; they end where the client goes away before."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        answer.cancel()

    watching = asyncio.create_task(watch())
    try:
        async for _ in answer.steps():
            pass
    finally:
        watching.cancel()
        answer.end()
    fault = next((choice.finish for choice in answer.choices if choice.finish in FAULTS), None)
    return JSONResponse(answer.whole()) if fault is None else problem(*FAULTS[fault])


class Guard:
    """Before all routes: who may ask, and how much; after them: the count of answers. Plain ASGI,
    since it has to count the bytes of a body as they come."""

    def __init__(self, app: ASGIApp, limits: ServeConfig, metrics: Metrics):
        self.app, self.limits, self.metrics = app, limits, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def counted_receive() -> MutableMapping[str, Any]:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limits.most_bytes:  # the route that reads it lets this pass
                raise HTTPException(413, f"a request has at most {self.limits.most_bytes} bytes.")
            return message

        async def counted_send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(str(message["status"])).inc()
            await send(message)

        is_http = scope["type"] == "http"
        refusal = self._refusal(Headers(scope=scope), scope["path"]) if is_http else None
        try:
            await (refusal or self.app)(scope, counted_receive, counted_send)
        except Exception:  # it is answered outside
            self.metrics.requests.labels("500").inc()
            raise

    def _refusal(self, headers: Headers, path: str) -> Response | None:
        host = headers.get("host", "")
        if not is_allowed(host, ["localhost", self.limits.host, *self.limits.allowed_hosts]):
            return problem(
                400,
                f"this server is not called '{host}', as the header Host says. Ask for localhost "
                "or its address, or have it started with allowed_hosts=[NAME].",
            )
        key = self.limits.api_key
        sent = headers.get("authorization", "").removeprefix("Bearer ").encode()
        needs_key = key is not None and path.startswith("/v1/")
        if needs_key and not hmac.compare_digest(sent, str(key).encode()):
            return problem(401, "send the server's key: 'Authorization: Bearer KEY'.")
        return None


def is_allowed(host: str, names: Sequence[str]) -> bool:
    """Whether a Host header has a name that one of these patterns fits, or an address: only a name
    can be made to lead elsewhere. starlette's `TrustedHostMiddleware` takes no address but those
    that are listed, and says nothing of the fix."""
    try:
        name = urlsplit(f"//{host}").hostname or ""  # without port and brackets, in small letters
        if any(fnmatchcase(name, pattern.lower()) for pattern in names):
            return True
        ip_address(name)
    except ValueError:
        return False
    return True
