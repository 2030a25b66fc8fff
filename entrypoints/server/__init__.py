"""The HTTP server: OpenAI routes, native routes and operations, over one :class:`EngineClient`.
Imports no torch.
"""

from __future__ import annotations

from glowplug.entrypoints.server.app import create_app
from glowplug.entrypoints.server.serve import main, run

__all__ = ["create_app", "main", "run"]
