"""Request and response bodies as pydantic models: every number has bounds, every model is in
``/openapi.json``.
"""
