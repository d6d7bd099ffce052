"""The HTTP routes: models, completions, chats, health, metrics; who may use them and how errors look.

Owns the app. What a body means is `parse`'s, how an answer is made and written `respond`'s.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from perflab.serve.errors import ApiError
from perflab.serve.fields import CHAT, COMPLETION, openapi_body
from perflab.serve.metrics import CONTENT_TYPE
from perflab.serve.respond import Completion
from perflab.serve.service import Service

BODY_S = 60  # no honest client takes longer to send what is allowed


class _Stamp:
    """Outermost: the moment at which a request begins to arrive."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._now = app, service.clock.now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["received_ns"] = self._now()
        await self._app(scope, receive, send)


def _responses(*kinds: str) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI description: a 200 of these media types, and the errors."""
    return {
        200: {"content": {kind: {} for kind in kinds or ("application/json",)}},
        "4XX": {"description": "The request is at fault; `error.param` names the field."},
        "5XX": {"description": "The server is at fault, or not ready (503, with Retry-After)."},
    }


def create_app(service: Service, api_key: str | None = None) -> FastAPI:
    """The app in front of `service`, which it starts and closes. With `api_key`, /v1 asks for it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        warm_up = asyncio.create_task(service.warm_up())
        try:
            yield
        finally:
            warm_up.cancel()
            await service.close()

    app = FastAPI(
        title="perflab", version=metadata.version("perflab"), lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.router.redirect_slashes = False
    app.add_middleware(_Stamp, service=service)

    def authorise(request: Request) -> None:
        if api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            given.strip().encode("latin-1"), api_key.encode()
        ):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer …", code="invalid_api_key")

    async def complete(request: Request, chat: bool) -> Response:
        authorise(request)
        body = await _read(request, service.limits.max_body_bytes)
        return await Completion.of(service, request, body, chat)

    @app.post(
        "/v1/chat/completions",
        openapi_extra=openapi_body(CHAT, "messages"),
        responses=_responses("application/json", "text/event-stream"),
    )
    async def chat_completions(request: Request) -> Response:
        return await complete(request, chat=True)

    @app.post(
        "/v1/completions",
        openapi_extra=openapi_body(COMPLETION, "prompt"),
        responses=_responses("application/json", "text/event-stream"),
    )
    async def completions(request: Request) -> Response:
        return await complete(request, chat=False)

    @app.get("/v1/models", responses=_responses())
    async def models(request: Request) -> Response:
        authorise(request)
        return _json({"object": "list", "data": [service.card()]})

    @app.get("/v1/models/{model:path}", responses=_responses())
    async def one_model(request: Request, model: str) -> Response:
        authorise(request)
        service.check_model(model)
        return _json(service.card())

    @app.get("/health", responses=_responses())
    async def health() -> Response:
        """The engine works, or is warming up."""
        service.check_health()
        return _json({"status": "ok"})

    @app.get("/ready", responses=_responses())
    async def ready() -> Response:
        """Requests would be served now."""
        service.check_ready()
        return _json({"status": "ready"})

    @app.get("/metrics", responses=_responses("text/plain"))
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE})

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        service.metrics.refused(error.code)
        headers = {name.decode(): value.decode() for name, value in error.headers}
        return Response(error.body(), error.status, headers, "application/json")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        found = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return Response(found.body(), found.status, error.headers, "application/json")

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        found = ApiError(500, f"internal error ({type(error).__name__})", code="internal_error")
        return Response(found.body(), 500, media_type="application/json")

    return app


async def _read(request: Request, limit: int) -> bytes:
    """The body. Raises ApiError as soon as it is longer than `limit` bytes."""
    too_long = ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limit:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_S} s", code="body_too_slow") from None
    except ClientDisconnect:
        raise ApiError(400, "the client went away before its body had come", code="no_body") from None
    return bytes(body)


def _json(content: Any) -> Response:
    return Response(json.dumps(content), media_type="application/json")
