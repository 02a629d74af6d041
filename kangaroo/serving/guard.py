"""Before all routes: who may ask, and how much; after them: the count of answers."""

from __future__ import annotations

import hmac
from collections.abc import MutableMapping, Sequence
from fnmatch import fnmatchcase
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kangaroo.serving.answers import problem
from kangaroo.serving.config import ServeConfig
from kangaroo.serving.metrics import Metrics


class Guard:
    """Plain ASGI, since it has to count the bytes of a body as they come."""

    def __init__(self, app: ASGIApp, limits: ServeConfig, metrics: Metrics):
        self.app, self.limits, self.metrics = app, limits, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted_send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(str(message["status"])).inc()
            await send(message)

        app: ASGIApp | None = self._refusal(Headers(scope=scope), scope["path"])
        if app is None:
            body = await self._body(receive)
            app = self._too_large() if body is None else self.app
            receive = receive if body is None else replayed(body, receive)
        await app(scope, receive, counted_send)

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
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.limits.most_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> Response:
        return problem(413, f"a request has at most {self.limits.most_bytes} bytes.")

    async def _body(self, receive: Receive) -> bytes | None:
        """All of it; None where it is too large."""
        body, more = bytearray(), True
        while more and len(body) <= self.limits.most_bytes:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return bytes(body) if len(body) <= self.limits.most_bytes else None


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


def replayed(body: bytes, receive: Receive) -> Receive:
    """What gives a body that was read already, and then whatever comes."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> MutableMapping[str, Any]:
        return messages.pop() if messages else await receive()

    return read
