"""Tools that a request offers to the model, and its choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: name of the function.
        description: purpose of the function, for the model; "": not given.
        parameters: JSON schema of the arguments, an object; None: not given.
        strict: the arguments have to match the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments; any object if the request gives none."""
        return {"type": "object", **(self.parameters or {})}

    def described(self) -> dict[str, Any]:
        """Return the tool as chat templates take it: in the form of OpenAI's chat API."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """The request's rule for calls.

    Attributes:
        mode: "auto": the model decides; "none": no calls; "required": at least one call, and
            nothing else.
        name: with "required", the only function that may be called; "": any.
        parallel: one answer may have several calls.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str = ""
    parallel: bool = True
