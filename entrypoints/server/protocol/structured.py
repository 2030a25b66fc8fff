"""Fields of request bodies for structured output, as OpenAI, vLLM and SGLang spell them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from glowplug.entrypoints.server.protocol.body import Body

MAX_CHOICES = 4096  #: texts of a list of choices


class GrammarFields(Body):
    """SGLang's fields; a request may give one of all fields for structured output."""

    json_schema: str | dict[str, Any] | None = Field(None, description="JSON schema of the answer")
    regex: str | None = Field(None, description="regular expression of the whole answer")
    ebnf: str | None = Field(None, description="grammar of the answer, as in llama.cpp")
    structural_tag: str | dict[str, Any] | None = Field(
        None, description="text with tags, whose contents have a schema"
    )


class OpenAIGrammarFields(GrammarFields):
    """OpenAI's and vLLM's fields."""

    response_format: Any = Field(
        None,
        description="text, json_object, json_schema or structural_tag, an object with its type",
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="json, regex, choice, grammar, json_object or structural_tag"
    )
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, max_length=MAX_CHOICES)
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
