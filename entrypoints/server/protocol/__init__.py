"""pydantic models of request and response bodies.

Every number has bounds, and every model is in ``/openapi.json``.
"""
