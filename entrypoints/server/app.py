"""The FastAPI app of the server.

It has the routes, one authentication dependency for all of them, one error format and one outer
layer of limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import OutputParserFactory
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.entrypoints.front.client import EngineClient
from glowplug.entrypoints.server import errors
from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.page.files import PageFile, page_files
from glowplug.entrypoints.server.plugin_routes import RouteChecks, ServerHandle
from glowplug.entrypoints.server.routes import ROUTES
from glowplug.entrypoints.server.transport import auth
from glowplug.entrypoints.server.transport.body import install_schema
from glowplug.entrypoints.server.transport.limits import RequestGate
from glowplug.entrypoints.server.transport.streaming import json_response


def create_app(
    plan: EnginePlan,
    client: EngineClient,
    tokenizer: Tokenizer | None,
    parsers: Sequence[OutputParserFactory] = (),
    plugins: Any = None,
) -> FastAPI:
    """Create the FastAPI app of the server with all routes, authentication and limits.

    Args:
        plan: the engine's plan.
        client: the engine's client.
        tokenizer: None if the engine runs without one.
        parsers: the plan's output parsers, in order.
        plugins: a PluginSet whose ``extend_app`` hooks may add routes, which are authenticated
            like all others; None: no hooks are called.

    Raises:
        PluginLoadError: a plugin added a route that authentication would not cover, one with the
            method and path of another, or a websocket without a package for them.
    """
    context = Context.of(plan, client, tokenizer, parsers, plugins)
    page = page_files(context.options.api_key is not None) if context.options.page else []
    authoriser = auth.Authoriser(
        context.options,
        [route.path for route in ROUTES if route.admin],
        [file.path for file in page],
    )
    # NOTE: /docs is left out because its page loads scripts from another host. /openapi.json is a
    # regular route, with authentication.
    app = FastAPI(
        title="glowplug",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(authoriser.dependency())],
    )
    app.state.context = context
    _add_routes(app, page)
    app.state.handle = ServerHandle(app, context, authoriser)
    _extend(app, plan, plugins)
    auth.require_guarded(app)
    errors.install(app)
    bodies = (route.body for route in ROUTES if route.body is not None)
    install_schema(app, bodies, (route.error for route in ROUTES))
    _add_middleware(app, context)
    return app


def _extend(app: FastAPI, plan: EnginePlan, plugins: Any) -> None:
    """Let plugins add routes, and check those of each."""
    if plugins is not None:
        handle = app.state.handle
        check = RouteChecks(app).check
        plugins.call_each("extend_app", after=check, app=app, plan=plan, engine=handle)


def _add_routes(app: FastAPI, page: Sequence[PageFile]) -> None:
    """Add the server's own routes, as opposed to those of plugins."""
    for route in ROUTES:
        for method in route.methods:
            app.add_api_route(
                route.path,
                route.endpoint,
                methods=[method],
                tags=[route.tag],
                response_model=None,
                response_class=PlainTextResponse if route.answer is None else JSONResponse,
                responses=route.responses(),
                openapi_extra=route.request(),
            )
    app.add_api_route(
        "/openapi.json", _openapi_route(app), methods=["GET"], include_in_schema=False
    )
    for file in page:
        app.add_api_route(file.path, file.respond, methods=["GET"], include_in_schema=False)


def _add_middleware(app: FastAPI, context: Context) -> None:
    """Add the layer for CORS, if configured, and the outermost layer: the limits on requests."""
    if context.options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(context.options.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=[
                "anthropic-version",
                "authorization",
                "content-type",
                "x-api-key",
                "x-request-id",
            ],
        )
    app.add_middleware(
        RequestGate,
        max_body_bytes=context.options.max_body_bytes,
        metrics=context.metrics,
        log=context.log,
        observers=context.observers,
        polls=[route.path for route in ROUTES if route.poll],
        origins=context.options.cors_origins,
    )


def _openapi_route(app: FastAPI) -> Any:
    async def openapi() -> Response:
        return json_response(app.openapi())

    return openapi
