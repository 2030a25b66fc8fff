"""Names of a tokenizer's files, and the values of ``--tokenizer`` that name no folder."""

from __future__ import annotations

BYTES = "bytes"  #: value for the byte-level tokenizer
NONE = "none"  #: value for no tokenizer
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
