"""Required and strict calls in each format, by each library: what is allowed is parsed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from glowplug.core.protocols import GrammarBackend, OutputRequest
from glowplug.core.step.structured import GrammarSpec
from glowplug.core.step.tools import Tool, ToolChoice
from glowplug.core.text.tokenizer import Tokenizer
from tests.contract.test_grammars import allowed, backend, tokenizer, walk
from tests.contract.test_tool_parsers import FORMATS, WRITERS, make
from tests.support import tool_dialogues
from tests.support.tool_dialogues import CHINESE, EMPTY, NESTED, PARIS, QUOTES

pytest.importorskip("jsonschema")
from tests.support import called_tools
from tests.support.called_tools import valid_calls

__all__ = ["backend", "tokenizer"]  # fixtures

PARALLEL = ToolChoice("required")
SINGLE = ToolChoice("required", parallel=False)
NAMED = ToolChoice("required", "paint")
DSML = ("deepseek_v32", "deepseek_v4", "deepseek_v41")


def asked(choice: ToolChoice, tools: Sequence[Tool] = tool_dialogues.TOOLS) -> OutputRequest:
    return OutputRequest(tools=tuple(tools), tool_choice=choice)


def grammar(name: str, request: OutputRequest) -> GrammarSpec:
    found = make(name).call_grammar(request)
    assert found is not None
    return found


def written(name: str, calls: Sequence[tool_dialogues.Call]) -> str:
    """Return calls as the model's chat template writes them."""
    if name == "pythonic":  # of the two kinds of quotes, the grammar has JSON's
        return tool_dialogues.pythonic(calls, tool_dialogues.dumped)
    text = WRITERS[name](calls).removeprefix("<|python_tag|>")
    return "\n\n" + text if name in DSML else text


def follows(
    library: GrammarBackend, tokenizer: Tokenizer, spec: GrammarSpec, text: str
) -> str | None:
    """Return the text before the first token that a grammar forbids, or None."""
    matcher = library.compile(spec).matcher()
    ids = tokenizer.encode(text, add_special_tokens=False)
    for i, token in enumerate(ids):
        if not matcher.accept(token):
            return tokenizer.decode(ids[:i], skip_special_tokens=False)
    return None if matcher.complete() else text


def test_a_required_call_is_allowed_as_the_model_was_trained_to_write_it(
    backend: GrammarBackend, tokenizer: Tokenizer
) -> None:
    for name in FORMATS:
        several = grammar(name, asked(PARALLEL))
        for calls in ([PARIS], [EMPTY], [PARIS, CHINESE, EMPTY], [NESTED, QUOTES]):
            text = written(name, calls)
            assert follows(backend, tokenizer, several, text) is None, (name, calls)
        for choice in (SINGLE, ToolChoice("required", "get_weather")):
            one = grammar(name, asked(choice))
            assert follows(backend, tokenizer, one, written(name, [PARIS])) is None, name
            assert follows(backend, tokenizer, one, written(name, [PARIS, PARIS])), name
        for calls in ([("other", {})], [("get_weather", {})]):
            assert follows(backend, tokenizer, several, written(name, calls)), (name, calls)
        assert follows(backend, tokenizer, several, "Hello") is not None


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("choice", [PARALLEL, SINGLE, NAMED], ids=["parallel", "single", "named"])
def test_every_text_of_required_calls_parses_into_calls_of_the_schemas(
    backend: GrammarBackend, tokenizer: Tokenizer, name: str, choice: ToolChoice
) -> None:
    request = asked(choice, called_tools.TOOLS)
    compiled = backend.compile(grammar(name, request))
    counts = set()
    for seed in range(6):
        text = walk(compiled.matcher(), tokenizer, seed, most=600)
        if text is None:  # a parallel answer may have calls without end
            assert choice is PARALLEL
            continue
        parser = make(name).start(request)
        names = valid_calls([*parser.feed(text), *parser.finish()])
        counts.add(len(names))
        assert choice is not NAMED or set(names) == {"paint"}
    assert counts and (choice is PARALLEL or counts == {1})


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_strict_call_matches_its_schema_and_others_are_free(
    backend: GrammarBackend, tokenizer: Tokenizer, name: str
) -> None:
    tools = (replace(called_tools.PAINT, strict=True), *tool_dialogues.TOOLS)
    given = {"colour": "red", "spots": []}
    calls = [("paint", given), PARIS, NESTED]
    good = written(name, calls)
    if name == "pythonic":  # the grammar allows one call in a list
        good = "\n".join(written(name, [call]) for call in calls)
    wrong = written(name, [("paint", {**given, "colour": "blue"})])
    for parallel in (True, False):
        spec = grammar(name, asked(ToolChoice("auto", parallel=parallel), tools))
        if parallel or name != "kimi_k2":  # its calls would need one number
            assert follows(backend, tokenizer, spec, f"I paint.\n\n{good}") is None
        assert follows(backend, tokenizer, spec, "No call.") is None
        assert follows(backend, tokenizer, spec, wrong) is not None


def test_the_next_call_of_kimi_has_the_next_number(
    backend: GrammarBackend, tokenizer: Tokenizer
) -> None:
    text = written("kimi_k2", [PARIS])
    spec = grammar("kimi_k2", replace(asked(SINGLE), earlier_calls=3))
    assert follows(backend, tokenizer, spec, text) is not None
    assert follows(backend, tokenizer, spec, text.replace(":0<", ":3<")) is None


class TestDsml:
    """Arguments as elements where the schema allows it, as a JSON object otherwise."""

    name = "deepseek_v32"

    def spec(self, schema: dict[str, Any]) -> GrammarSpec:
        return grammar(self.name, asked(PARALLEL, [Tool("f", parameters=schema)]))

    def test_a_free_text_ends_at_the_first_closing_tag(
        self, backend: GrammarBackend, tokenizer: Tokenizer
    ) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
        text = written(self.name, [("f", {"a": 'x </ "q"\n<｜DSML｜parameter'})])
        assert follows(backend, tokenizer, self.spec(schema), text) is None
        for tag in ("</｜DSML｜parameter>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>"):
            more = text.replace("x </", tag)
            assert follows(backend, tokenizer, self.spec(schema), more) is not None, tag

    @pytest.mark.parametrize(
        "schema",
        [
            {"type": "object", "properties": {'a"': {"type": "integer"}}, "required": ['a"']},
            {"type": "object", "properties": {"b": {"$ref": "#"}}, "required": []},
            {"type": "object", "properties": {}, "minProperties": 1},
            {"type": "object", "required": ["z"]},
        ],
        ids=["name", "reference", "count", "open"],
    )
    def test_other_schemas_take_a_json_object(self, schema: dict[str, Any]) -> None:
        assert "parameter name" not in self.spec(schema).text
        assert '"json_schema"' in self.spec(schema).text


def test_special_tokens_of_a_tag_are_written_as_tokens(tokenizer: Tokenizer) -> None:
    """xgrammar has no text of special tokens, and llguidance keeps all added ones apart."""
    backend_of = pytest.importorskip("xgrammar") and _xgrammar(tokenizer)
    begin = tokenizer.encode("<｜tool▁calls▁begin｜>", add_special_tokens=False)
    for request in (asked(PARALLEL), asked(ToolChoice("auto"))):
        tools = tuple(replace(tool, strict=True) for tool in request.tools)
        spec = grammar("deepseek_v31", replace(request, tools=tools))
        matcher = backend_of.compile(spec).matcher()
        assert set(begin) <= set(allowed(matcher))
        for token in tokenizer.encode(written("deepseek_v31", [PARIS, EMPTY]), False):
            assert matcher.accept(token), tokenizer.decode([token], skip_special_tokens=False)
        assert matcher.complete()


def _xgrammar(tokenizer: Tokenizer) -> GrammarBackend:
    """Return the library for a tokenizer whose tags of calls are special tokens."""
    import tokenizers

    from glowplug.core.protocols import Worker
    from glowplug.core.testing.harness.build import make as build
    from glowplug.core.testing.harness.plans import bare_plan

    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(
        [
            entry.content
            for entry in tokenizer.backend.get_added_tokens_decoder().values()
            if "tool" in entry.content
        ]
    )
    special = Tokenizer(backend, special_tokens={"eos_token": "<｜end▁of▁sentence｜>"})
    found: GrammarBackend = build("grammar", "xgrammar", bare_plan(), Worker())
    found.open(special, 2048)
    return found
