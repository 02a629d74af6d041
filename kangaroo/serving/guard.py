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
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from kangaroo.serving.answers import problem
from kangaroo.serving.config import ServeConfig
from kangaroo.serving.metrics import Metrics


class Guard:
    """Plain ASGI, since it has to count the bytes of a body as they come."""

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
