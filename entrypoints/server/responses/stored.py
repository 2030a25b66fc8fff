"""Routes to read, delete and cancel stored responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from fastapi import Depends, Query
from starlette.responses import Response

from glowplug.core.errors import RequestError
from glowplug.entrypoints.server.context import Context, get_context
from glowplug.entrypoints.server.generate.params import unsupported
from glowplug.entrypoints.server.transport.streaming import json_response

Server = Annotated[Context, Depends(get_context)]
PAGE_ITEMS = 20  #: items on a page of the input
PAGE_ITEMS_MAX = 100


async def retrieve(response_id: str, context: Server, stream: bool = False) -> Response:
    """Return a stored response."""
    if stream:
        raise unsupported("stream", "is not supported here: a stored response is read as a whole")
    return Response(context.stored.get(response_id).body, media_type="application/json")


async def delete(response_id: str, context: Server) -> Response:
    """Delete a stored response."""
    context.stored.delete(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel(response_id: str, context: Server) -> Response:
    """End a response in progress."""
    found = context.stored.get(response_id)
    if not found.rid:
        raise RequestError("only a response in progress can be cancelled, and this one has ended")
    await context.client.abort(found.rid)
    return json_response({**orjson.loads(found.body), "status": "cancelled"})


async def list_items(
    response_id: str,
    context: Server,
    limit: Annotated[int, Query(ge=1, le=PAGE_ITEMS_MAX)] = PAGE_ITEMS,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(max_length=256)] = None,
) -> Response:
    """Return the items of a stored response's own input, in pages."""
    items: list[dict[str, Any]] = orjson.loads(context.stored.get(response_id).items)
    if order == "desc":
        items.reverse()
    if after is not None:
        items = items[_place_of(after, items) + 1 :]
    page = items[:limit]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }
    )


def _place_of(id: str, items: list[dict[str, Any]]) -> int:
    """Return the index of the item with an id."""
    for place, item in enumerate(items):
        if item["id"] == id:
            return place
    raise RequestError("after: the response has no item with this id", param="after")
