"""A websocket that sends tokens as they come: ``--plugin glowplug_surface.live``.

It is a plugin of its own because it needs ``pip install 'glowplug[websockets]'``.
"""

from __future__ import annotations

from typing import Any

from glowplug.core.api import hookimpl
from glowplug.core.protocols import EngineHandle


@hookimpl
def extend_app(app: Any, engine: EngineHandle) -> None:
    from fastapi import APIRouter

    from glowplug_surface.routes import live

    router = APIRouter(prefix="/live")
    router.add_api_websocket_route("", live(engine))
    router.add_api_websocket_route("/load", live(engine))
    app.include_router(router)
    engine.admin("/live/load")
