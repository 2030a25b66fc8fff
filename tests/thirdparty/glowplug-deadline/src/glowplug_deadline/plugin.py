"""The declaration of the scheduling policy "deadline". It imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from glowplug.core.api import Component, PolicyOffers, PolicyOptions, hookimpl


class RequestFields(BaseModel):
    """The fields of a request's ``ext``."""

    model_config = ConfigDict(extra="forbid")
    deadline: float = Field(3600.0, gt=0, description="seconds in which the answer is needed")
    start_in: float = Field(0.0, ge=0, le=3600, description="seconds before which it waits")


class DeadlineOptions(PolicyOptions):
    use: Literal["deadline"] = "deadline"
    lead: float = Field(
        1.0, ge=0, description="seconds by which a running request must be less urgent to give way"
    )


@hookimpl
def register_scheduling_policies() -> list[Component]:
    return [
        Component(
            name="deadline",
            options=DeadlineOptions,
            factory="glowplug_deadline.runtime:Deadline",
            offers=PolicyOffers(request_fields="glowplug_deadline.plugin:RequestFields"),
            summary="earliest deadline first; late requests are rejected",
        )
    ]
