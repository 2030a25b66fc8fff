"""Structural tags in llguidance: tags that are tokens of their own, texts, and mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug.core.errors import RequestError
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.plugins.grammar.structural_lark import structural_lark

llguidance = pytest.importorskip("llguidance")

CHECKPOINT = Path(__file__).resolve().parents[2] / "models" / "embedded" / "checkpoint"
TOKENIZER = Tokenizer.from_folder(CHECKPOINT)
VOCAB = 2048
SEPARATOR = "<｜tool▁sep｜>"
EMPTY: dict[str, Any] = {"type": "object", "additionalProperties": False}
TOKENS = llguidance.LLTokenizer(
    TOKENIZER.backend.to_str(), n_vocab=VOCAB, eos_token=list(TOKENIZER.eos_ids)
)
SPECIAL = {
    entry.content: token for token, entry in TOKENIZER.backend.get_added_tokens_decoder().items()
}


def tag(trigger: str, *begins: str, end: str = "!") -> dict[str, Any]:
    structures = [{"begin": begin, "schema": EMPTY, "end": end} for begin in begins]
    return {"structures": structures, "triggers": [trigger]}


def follows(given: dict[str, Any], text: str) -> bool:
    """Return whether the grammar allows a text, and its end."""
    ids: Sequence[int] = TOKENIZER.encode(text, add_special_tokens=False)
    lark = structural_lark(given, SPECIAL, TOKENIZER.eos_ids)
    matcher = llguidance.LLMatcher(TOKENS, lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    mask = np.zeros(-(-VOCAB // 32), dtype=np.int32)
    for token in ids:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = bool(mask[token // 32] >> token % 32 & 1)
        assert allowed == bool(matcher.try_consume_tokens([token])), token
        if not allowed:
            return False
    return bool(matcher.is_accepting())


TRIGGERS = {
    "text": "<call>",
    "token": SEPARATOR,
    "token and text": f"{SEPARATOR}call",
    "mixture": f"<{SEPARATOR}call",
}


@pytest.mark.parametrize("trigger", TRIGGERS.values(), ids=TRIGGERS.keys())
def test_the_grammar_begins_with_a_tag(trigger: str) -> None:
    given = tag(trigger, f"{trigger} a:", f"{trigger} b<｜tool▁sep｜>:")
    for good in (
        "plain < text",
        "<think>x</think>plain",
        f"a {trigger} a:{{}}! b",
        f"<｜tool▁calls▁begin｜>{trigger} b{SEPARATOR}:{{}}!{trigger} a:{{}}!<｜tool▁calls▁end｜>",
    ):
        assert follows(given, good), good
    for behind in (" c:{}!", " a:{1}!", " a:{}?", " a:"):
        assert not follows(given, f"x {trigger}{behind}"), behind


def test_a_token_of_several_tags_may_be_followed_by_other_text() -> None:
    given = tag(f"<{SEPARATOR}invoke", f"<{SEPARATOR}invoke a>")
    assert follows(given, f"<{SEPARATOR}calls>\n<{SEPARATOR}invoke a>{{}}!\n</{SEPARATOR}calls>")
    assert not follows(given, f"<{SEPARATOR}calls>\n<{SEPARATOR}invoke b>{{}}!")


def test_a_tag_without_a_trigger_is_refused() -> None:
    with pytest.raises(RequestError, match="no trigger is a prefix"):
        structural_lark(tag("<a>", "<b>"), SPECIAL, TOKENIZER.eos_ids)
