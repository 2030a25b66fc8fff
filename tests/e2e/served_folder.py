"""A tiny model folder that a server can serve."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.fake_engine import EOS, TEMPLATE, VOCAB, make_tokenizer
from tests.support.tiny import write_config


def write_served(folder: Path) -> Path:
    """Write a V3 config with a byte-level tokenizer; weights are drawn from the seed."""
    write_config(folder, "v3", vocab_size=VOCAB, eos_token_id=EOS)
    make_tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "bos_token": "<bos>", "eos_token": "<eos>"})
    )
    return folder
