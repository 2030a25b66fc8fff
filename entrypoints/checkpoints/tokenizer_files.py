"""Files of a tokenizer in a model folder, and the words that stand for one."""

from __future__ import annotations

BYTES = "bytes"  #: one token a byte
NONE = "none"  #: no tokenizer
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
