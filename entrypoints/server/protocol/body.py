"""The base class of request bodies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """The base class of request bodies. Unknown fields are kept, so that they can be reported."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    def extras(self) -> dict[str, Any]:
        """Return the body's fields that this model does not declare."""
        return self.model_extra or {}
