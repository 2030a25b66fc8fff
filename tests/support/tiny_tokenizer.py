"""Small tokenizers trained on the spot: byte-level BPE as DeepSeek's, and byte tokens as Llama
2's.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

BOS, EOS, USER, ASSISTANT = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)
SPECIALS = [BOS, EOS, USER, ASSISTANT]
TEXT = [
    "The capital of France is Paris, and the quick brown fox jumps over the lazy dog. ",
    "def add(a, b):\n    return a + b\n\n",
    "日本の首都は東京です。中国的首都是北京。",
    "naïve café über Straße",
    "👩‍👩‍👧 family 🇩🇪 flag 👍🏽 thumbs",
    "0 1 2 3 4 5 6 7 8 9 10 11 12",
]
CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}<｜User｜>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    "<｜Assistant｜>{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% if thinking %}<think>\n{% endif %}{% endif %}"
)


@cache
def byte_level(vocabulary: int = 400) -> str:
    """Return the JSON of a byte-level BPE with DeepSeek's special tokens and a visible
    ``<think>``.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    visible = [AddedToken("<think>", special=False), AddedToken("</think>", special=False)]
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=SPECIALS,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.add_tokens(visible)
    return str(tokenizer.to_str())


@cache
def byte_fallback() -> str:
    """Return the JSON of a BPE over characters with ``▁`` for spaces and ``<0xNN>`` for bytes
    outside its alphabet.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [text for text in TEXT if text.isascii()]
    tokenizer.train_from_iterator(
        letters, trainers.BpeTrainer(vocab_size=500, special_tokens=names, show_progress=False)
    )
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] in ("<unk>", "<s>", "</s>")
    data["added_tokens"] = [token for token in data["added_tokens"] if token["special"]]
    return json.dumps(data)


def write_folder(folder: Path, chat_template: str | None = CHAT) -> Path:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json as in published
    folders.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(byte_level(), encoding="utf-8")
    config = {
        "bos_token": {"__type": "AddedToken", "content": BOS, "lstrip": False},
        "eos_token": EOS,
        "add_bos_token": True,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 2]}), encoding="utf-8"
    )
    return folder
