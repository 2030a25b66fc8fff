"""A server for tests of the routes that share the turn of chat: reasoning and calls are parsed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from glowplug.core.protocols import Worker
from glowplug.plugins.outputs.calls.factories import DeepseekV3Calls
from glowplug.plugins.outputs.deepseek_r1 import DeepseekR1Options
from glowplug.plugins.outputs.deepseek_r1_runtime import DeepseekR1
from glowplug.plugins.outputs.tool_calls import DeepseekV3Options
from tests.e2e.fake_engine import FakeExecutor, make_plan
from tests.e2e.serving import Served, served
from tests.support.tool_dialogues import CHINESE, PARIS, WEATHER, deepseek_v3

CALLS = deepseek_v3([PARIS, CHINESE])  #: two calls of WEATHER, as the model writes them
THOUGHT = "<think>first this, then that</think>"
PARAMETERS = WEATHER.parameters

#: answers of the model: text, then the kinds of their blocks
ANSWERS = {
    "plain zwölf 🗼": ["content"],
    f"{THOUGHT}so it is": ["reasoning", "content"],
    f"{THOUGHT}Let me look.{CALLS}": ["reasoning", "content", "tool_call", "tool_call"],
    CALLS: ["tool_call", "tool_call"],
    "": [],
}

#: parts of a body that no route may answer with a fault of the server: (field, value)
HOSTILE: tuple[tuple[str, Any], ...] = (
    ("model", 5),
    ("model", "x" * 600),
    ("stream", "yes"),
    ("temperature", "hot"),
    ("temperature", 1e9),
    ("top_p", -1),
    ("tools", {"a": 1}),
    ("tools", [{}]),
    ("tools", [None] * 100),
    ("tools", [{"type": "function", "name": "a b", "input_schema": {}, "parameters": {}}]),
    ("tools", [{"name": "f", "type": "function", "parameters": 1, "input_schema": 1}]),
    ("tool_choice", "maybe"),
    ("tool_choice", {"type": "function", "name": "nothing"}),
    ("tool_choice", {"type": "tool"}),
    ("tool_choice", ["auto"]),
    ("metadata", {str(n): "x" for n in range(99)}),
    ("n", 3),
    ("input", 5),
    ("input", []),
    ("input", [{}]),
    ("input", [[]]),
    ("input", [{"role": "user"}]),
    ("input", [{"role": "king", "content": "x"}]),
    ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]),
    ("input", [{"role": "user", "content": [{"type": "input_text"}]}]),
    ("input", [{"type": "x" * 500}]),
    ("input", [{"type": "web_search_call", "id": "a"}]),
    ("input", [{"type": "item_reference", "id": "a"}]),
    ("input", [{"type": "function_call", "call_id": "a"}]),
    ("input", [{"type": "function_call_output", "call_id": "nobody", "output": "x"}]),
    ("input", [{"type": "reasoning", "encrypted_content": "@@@"}]),
    ("input", [{"role": "user", "content": "x"}] * 20000),
    ("messages", 5),
    ("messages", []),
    ("messages", [{}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "tool", "content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "tool_result", "content": [5]}]}]),
    ("messages", [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]),
    ("messages", [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "a"}]}]),
    ("messages", [{"role": "user", "content": "x"}] * 20000),
    ("max_tokens", 0),
    ("max_tokens", 1 << 40),
    ("max_output_tokens", -1),
    ("max_output_tokens", "9"),
    ("stop_sequences", ["x"] * 1000),
    ("stop_sequences", 5),
    ("system", {"a": 1}),
    ("system", [{"type": "image"}]),
    ("thinking", {"type": "enabled"}),
    ("thinking", {"type": "enabled", "budget_tokens": 1 << 20}),
    ("thinking", {"type": "between_tools"}),
    ("thinking", True),
    ("output_config", {"format": {"type": "yaml"}}),
    ("output_config", {"effort": "some"}),
    ("reasoning", {"effort": "some"}),
    ("reasoning", "high"),
    ("text", {"format": {"type": "json_schema"}}),
    ("text", {"format": {"type": "yaml"}}),
    ("text", {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}),
    ("previous_response_id", "resp_unknown"),
    ("previous_response_id", "x" * 500),
    ("include", ["everything"]),
    ("truncation", "middle"),
    ("top_logprobs", 99),
    ("instructions", ["x"]),
    ("chat_template_kwargs", {"messages": "x"}),
)


@contextmanager
def served_apis(executor: FakeExecutor | None = None, **config: Any) -> Iterator[Served]:
    """Serve the fake engine with parsers of reasoning and of DeepSeek V3's calls."""
    plan = make_plan()
    parsers = [
        DeepseekR1(DeepseekR1Options(), plan, Worker()),
        DeepseekV3Calls(DeepseekV3Options(), plan, Worker()),
    ]
    with served(executor, parsers=parsers, **config) as one:
        yield one


def nested(levels: int) -> Any:
    """Return a list nested ``levels`` deep."""
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value
