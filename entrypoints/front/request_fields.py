"""The fields that a plan's components declare for requests (``SamplingParams.ext``)."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

from glowplug.core.errors import PluginLoadError, RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.loading import imported
from glowplug.core.step.request import SamplingParams


class RequestFields:
    """A check of ``SamplingParams.ext`` against the declared fields of a plan.

    Raises:
        PluginLoadError: the declared class cannot be imported, or is no pydantic model.
    """

    def __init__(self, plan: EnginePlan) -> None:
        self._title = plan.title("policy")
        self._model: type[BaseModel] | None = None
        if plan.request_fields:
            found: Any = imported(plan.request_fields, f"request_fields of {self._title}")
            if not (isinstance(found, type) and issubclass(found, BaseModel)):
                raise PluginLoadError(
                    f"{self._title}: request_fields {plan.request_fields!r} is no pydantic model"
                )
            self._model = found

    def checked(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with checked fields, to which defaults are added.

        Raises:
            RequestError: a field is unknown, missing or of a wrong value.
        """
        given = params.ext or {}
        names = list(self._model.model_fields) if self._model is not None else []
        for name in given:
            if name not in names:
                close = difflib.get_close_matches(name, names, 1)
                known = f"did you mean {close[0]!r}?" if close else _known(names)
                raise RequestError(f"unknown field {name!r}; {known}", param=f"ext.{name}")
        if self._model is None:
            return params if params.ext is None else params.replace(ext=None)
        try:
            return params.replace(ext=self._model(**given).model_dump(mode="json"))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            path = ".".join(str(part) for part in ("ext", *first["loc"]))
            raise RequestError(f"{path}: {first['msg']} ({self._title})", param=path) from None


def _known(names: list[str]) -> str:
    """Return the text that lists the fields of this plan."""
    if not names:
        return "no component of this engine has fields for requests"
    return f"this engine has {', '.join(names)}"
