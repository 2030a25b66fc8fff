"""The HTTP server: OpenAI routes, native routes and operations, over one :class:`EngineClient`.

It imports no torch. ``server.app`` builds the app and ``server.serve`` runs it.
"""
