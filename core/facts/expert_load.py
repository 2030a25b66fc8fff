"""The recorded load of experts: how many tokens chose each expert of each layer. No torch.

A server returns the record at ``GET /expert_load``. Expert parallelism places experts by it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_BYTES = 64 << 20  #: size limit of a file
RECORD = "write one with: curl -s http://HOST:PORT/expert_load > FILE"
Count = Annotated[int, Field(ge=0, lt=1 << 53)]


class ExpertLoad(BaseModel):
    """The load of a model's experts.

    Attributes:
        model: name of the model, for people.
        architecture: architecture of the model.
        layers: number of tokens that chose each expert, by the module path of the layer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str
    architecture: str
    layers: dict[str, Annotated[tuple[Count, ...], Field(min_length=1)]] = Field(min_length=1)


def recorded_load(model: str, architecture: str, info: Mapping[str, Any]) -> ExpertLoad | None:
    """Return the load of the experts over all ranks; None if it is not counted.

    Over all ranks a token counts once for each expert that it chose.

    Args:
        model: name of the model.
        architecture: architecture of the model.
        info: the engine's reply to the control "info".
    """
    layers: dict[str, tuple[int, ...]] = {}
    for rank in info.get("ranks", [info]):
        for layer, counts in rank.get("expert_load", {}).items():
            before = layers.get(layer, (0,) * len(counts))
            layers[layer] = tuple(a + b for a, b in zip(before, counts, strict=True))
    return ExpertLoad(model=model, architecture=architecture, layers=layers) if layers else None


def _read(value: Any) -> ExpertLoad:
    """Return the record in the file ``value``, or the record that ``value`` holds itself.

    A plan holds the record, so that its ranks need no file.
    """
    name = value if isinstance(value, str) else "the value"
    try:
        if isinstance(value, str):
            return ExpertLoad.model_validate_json(_content(value))
        return ExpertLoad.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{part}." for part in first["loc"]).rstrip(".")
        reason = f"{where}: {first['msg']}" if where else first["msg"]
        raise _refused(f"{name} is no recorded load of experts: {reason}") from None
    except OSError as error:
        raise _refused(f"{name} could not be read: {error.strerror}") from None


def _content(name: str) -> bytes:
    """Return the content of a file of a recorded load."""
    path = Path(os.path.expanduser(name))
    if "\0" not in name and path.stat().st_size <= MAX_BYTES:
        return path.read_bytes()
    raise _refused(f"{name!r} is no file of at most {MAX_BYTES >> 20} MiB")


def _refused(reason: str) -> PydanticCustomError:
    return PydanticCustomError("expert_load", "{reason}", {"reason": reason, "fix": RECORD})


#: a recorded load as an option: the configuration gives the path of a file
ExpertLoadFile = Annotated[
    ExpertLoad, BeforeValidator(_read), WithJsonSchema({"type": "string", "format": "path"})
]
