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

MOST_BYTES = 1 << 20  # of a request's body


class Guard:
    """Lets only those in who may ask: by the name that they call this server (were all allowed, a
    page in a user's browser could let its own name lead here and read the answers: DNS rebinding),
    by their key, and by how much they send. Plain ASGI, to count a body's bytes as they come.
    """

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
            app, body = self.app, await self._body(receive)
            if body is None:
                app = problem(413, f"a request has at most {MOST_BYTES} bytes.")
            else:
                receive = replayed(body, receive)
        await app(scope, receive, counted_send)

    def _refusal(self, headers: Headers, path: str) -> Response | None:
        host = headers.get("host", "")
        if not is_allowed(host, ["localhost", self.limits.host, *self.limits.allowed_hosts]):
            fix = "Ask for localhost or its address, or start it with allowed_hosts=[NAME]."
            return problem(400, f"the header Host calls this server '{host}', and it is not. {fix}")
        key = self.limits.api_key
        sent = headers.get("authorization", "").removeprefix("Bearer ").encode()
        needs_key = key is not None and path.startswith("/v1/")
        if needs_key and not hmac.compare_digest(sent, str(key).encode()):
            return problem(401, "send the server's key: 'Authorization: Bearer KEY'.")
        return None

    async def _body(self, receive: Receive) -> bytes | None:
        """All of it; None where it is too large."""
        body, more = bytearray(), True
        while more and len(body) <= MOST_BYTES:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return bytes(body) if len(body) <= MOST_BYTES else None


def is_allowed(host: str, names: Sequence[str]) -> bool:
    """Whether a Host header has a name that one of these patterns fits, or an address: only a name
    can be made to lead elsewhere."""
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
