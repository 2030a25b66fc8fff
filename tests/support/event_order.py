"""The published state machines of the streams of ``/v1/responses`` and ``/v1/messages``.

Each function checks every event of a stream and returns the object that the deltas add up to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Event = dict[str, Any]

#: type of an output item -> events about its text, and the field with the whole text
TEXTS = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
}
ENDS = {"response.completed", "response.incomplete", "response.failed"}
#: type of a block -> type of its deltas, and their field
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def events_of(text: str) -> list[Event]:
    """Return the events of a stream. The name of each one equals its type."""
    found = []
    for block in text.strip().split("\n\n"):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}", block
        found.append(event)
    return found


def response_of(events: list[Event]) -> Event:
    """Check a stream of ``/v1/responses`` and return the object of its last event."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    source = iter(events)
    created = taken(source, "response.created")["response"]
    assert taken(source, "response.in_progress")["response"] == created
    assert created["status"] == "in_progress" and created["output"] == []
    assert created["usage"] is None and created["completed_at"] is None
    items: list[Event] = []
    for event in source:
        if event["type"] in ENDS:
            assert next(source, None) is None, "events after the last one"
            made: Event = event["response"]
            assert made["id"] == created["id"] and made["output"] == items
            own = {"status", "output", "usage", "completed_at", "error", "incomplete_details"}
            assert {k: made[k] for k in made if k not in own} == {
                k: created[k] for k in created if k not in own
            }
            return made
        items.append(_item(event, source, len(items)))
    raise AssertionError("the stream has no last event")


def _item(added: Event, source: Iterator[Event], index: int) -> Event:
    """Check the events of one item and return it."""
    assert added["type"] == "response.output_item.added" and added["output_index"] == index
    item = added["item"]
    assert item["status"] == "in_progress"
    prefix, whole = TEXTS[item["type"]]
    call = item["type"] == "function_call"
    assert item["arguments"] == "" if call else item["content"] == []
    place = {"item_id": item["id"], "output_index": index}
    if not call:
        part = taken(source, "response.content_part.added", **place, content_index=0)["part"]
        assert part["text"] == ""
    text = ""
    logprobs: list[Event] = []
    while (event := next(source))["type"] == f"{prefix}.delta":
        assert place.items() <= event.items() and event["delta"]
        text += event["delta"]
        logprobs += event.get("logprobs", [])
    assert event["type"] == f"{prefix}.done" and place.items() <= event.items()
    assert event[whole] == text and event.get("logprobs", []) == logprobs
    if not call:
        done = taken(source, "response.content_part.done", **place, content_index=0)["part"]
        assert done["text"] == text and done.get("logprobs", []) == logprobs
    made: Event = taken(source, "response.output_item.done", output_index=index)["item"]
    assert made["id"] == item["id"] and made["status"] in ("completed", "incomplete")
    assert made["arguments"] == text if call else made["content"] == [done]
    assert {**made, "status": 0, "content": 0, "arguments": 0, "encrypted_content": 0} == {
        **item,
        "status": 0,
        "content": 0,
        "arguments": 0,
        "encrypted_content": 0,
    }
    return made


def message_of(events: list[Event]) -> Event:
    """Check a stream of ``/v1/messages`` and return the message that it makes."""
    source = iter(events)
    message: Event = taken(source, "message_start")["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    taken(source, "ping")
    for event in source:
        if event["type"] == "message_delta":
            assert event["delta"]["stop_reason"] is not None
            message |= {**event["delta"], "usage": event["usage"]}
            taken(source, "message_stop")
            assert next(source, None) is None, "events after the last one"
            return message
        message["content"].append(_block(event, source, len(message["content"])))
    raise AssertionError("the stream has no last event")


def _block(start: Event, source: Iterator[Event], index: int) -> Event:
    """Check the events of one block and return it."""
    assert start["type"] == "content_block_start" and start["index"] == index
    block: Event = start["content_block"]
    kind, field = DELTAS[block["type"]]
    text = ""
    while (event := next(source))["type"] == "content_block_delta":
        assert event["index"] == index
        if event["delta"]["type"] == "signature_delta":
            assert block["type"] == "thinking"
            block["signature"] = event["delta"]["signature"]
            continue
        assert event["delta"]["type"] == kind and event["delta"][field]
        text += event["delta"][field]
    assert event == {"type": "content_block_stop", "index": index}
    if block["type"] == "tool_use":
        assert block["input"] == {}
        return {**block, "input": json.loads(text or "{}")}
    assert block[block["type"]] == ""
    return {**block, block["type"]: text}


def taken(source: Iterator[Event], kind: str, **fields: Any) -> Event:
    """Return the next event, which has this type and these fields."""
    event = next(source, {"type": "nothing"})
    assert event["type"] == kind and fields.items() <= event.items(), (kind, event)
    return event
