"""The tokenizer: encoding, decoding at once and in pieces, special ids, and the folders it
opens.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

from glowplug.core.errors import RequestError
from glowplug.core.text.detokenize import WINDOW
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.plugins.outputs.tokenizer import open_tokenizer
from tests.support.source_tree import ROOT
from tests.support.tiny_tokenizer import (
    ASSISTANT,
    BOS,
    CHAT,
    EOS,
    TEXT,
    byte_fallback,
    byte_level,
    write_folder,
)

HARD = [
    *TEXT,
    "",
    " ",
    "\n\n",
    "é",
    "👩‍👩‍👧‍👦",
    "e\u0301",
    "\u200d",
    "\x00",
    "日",
    "a\ufffdb",
    "🇩🇪🇫🇷",
    "\U0010ffff",
    "ﷺ",
]
KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


@cache
def make(kind: str = "byte_level") -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(KINDS[kind]()))


def streamed(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool = True
) -> list[str]:
    stream, pieces, at = tokenizer.stream(skip), [], 0
    for size in [*sizes, len(ids)]:
        if at < len(ids) and size:
            pieces.append(stream.feed(ids[at : at + size]))
            at += size
    return [*pieces, stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_and_stream_of_hard_texts(kind: str) -> None:
    tokenizer = make(kind)
    for text in HARD:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        for sizes in ([1] * len(ids), [2] * len(ids), [3, 1, 5] * len(ids)):
            pieces = streamed(tokenizer, ids, sizes)
            assert "".join(pieces) == text
            if "\ufffd" not in text:
                assert all("\ufffd" not in piece for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(max_size=60),
    sizes=st.lists(st.integers(1, 4), max_size=60),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_stream_equals_whole_for_any_text(text: str, sizes: list[int], kind: str) -> None:
    tokenizer = make(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    assert whole == tokenizer.backend.decode(ids, skip_special_tokens=True)
    assert "".join(streamed(tokenizer, ids, sizes)) == whole


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 420), max_size=40),
    sizes=st.lists(st.integers(1, 5), max_size=40),
    skip=st.booleans(),
)
def test_any_ids_decode_as_the_library_does(ids: list[int], sizes: list[int], skip: bool) -> None:
    """Random ids are mostly invalid UTF-8; our byte table and the library must give the same
    text.
    """
    tokenizer = make()
    whole = tokenizer.decode(ids, skip)
    assert whole == tokenizer.backend.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(tokenizer, ids, sizes, skip)) == whole


def test_streams_wait_for_whole_characters() -> None:
    for kind in KINDS:
        tokenizer = make(kind)
        ids = tokenizer.encode("ok \U0001f9ff!", add_special_tokens=False)
        assert len(ids) > 5  # the emoji is in four tokens
        pieces = streamed(tokenizer, ids, [1] * len(ids))
        assert "\U0001f9ff" in pieces and "\ufffd" not in "".join(pieces)


def test_incomplete_bytes_come_out_at_the_end_only() -> None:
    for kind in KINDS:
        tokenizer = make(kind)
        ids = tokenizer.encode("a\U0001f9ff", add_special_tokens=False)[:-1]
        pieces = streamed(tokenizer, ids, [1] * len(ids))
        assert "\ufffd" not in "".join(pieces[:-1]) and "\ufffd" in pieces[-1]
        assert "".join(pieces) == tokenizer.decode(ids)


def test_endless_invalid_bytes_are_not_held_for_ever() -> None:
    tokenizer = make("byte_fallback")
    invalid = tokenizer.backend.token_to_id("<0xFF>")
    stream = tokenizer.stream()
    given_out = [stream.feed([invalid]) for _ in range(3 * WINDOW)]
    assert any(given_out)


def test_special_tokens() -> None:
    tokenizer = make()
    ids = tokenizer.encode(f"{ASSISTANT}<think>hm</think>{EOS}")
    assert ids[:2] == [0, 3] and ids[-1] == 1
    assert tokenizer.decode(ids) == "<think>hm</think>"
    assert (
        tokenizer.decode(ids, skip_special_tokens=False)
        == f"{BOS}{ASSISTANT}<think>hm</think>{EOS}"
    )
    assert (
        "".join(streamed(tokenizer, ids, [1] * 20, False))
        == f"{BOS}{ASSISTANT}<think>hm</think>{EOS}"
    )
    assert tokenizer.token_bytes(3) == ASSISTANT.encode()


def test_unknown_ids_give_no_text() -> None:
    for kind in KINDS:
        tokenizer = make(kind)
        for wrong in (tokenizer.vocab_size, 1 << 31, 1 << 40, -1):
            assert tokenizer.token_bytes(wrong) == b""
        assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_token_bytes_joined_are_the_text() -> None:
    for text in HARD:
        tokenizer = make()
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    tokenizer = make("byte_fallback")
    assert tokenizer.token_bytes(tokenizer.backend.token_to_id("<0xC3>")) == b"\xc3"
    assert tokenizer.token_bytes(tokenizer.encode("a fox", add_special_tokens=False)[0])[:1] == b" "


def test_lone_surrogates_cost_one_request() -> None:
    with pytest.raises(RequestError) as caught:
        make().encode("a\ud800b")
    assert caught.value.code == "invalid_unicode" and caught.value.status == 400
    assert make().encode("ok")


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(Tokenizer(backend).encode("x" * 30)) == 31


def test_bos_is_added_once() -> None:
    with_processor = Tokenizer(
        tokenizers.Tokenizer.from_str(byte_level()), special_tokens={"bos_token": BOS}, add_bos=True
    )
    assert with_processor.encode("hi")[0] == 0 and with_processor.encode("hi")[1] != 0
    data = json.loads(byte_level())
    data["post_processor"] = None
    bare = tokenizers.Tokenizer.from_str(json.dumps(data))
    assert Tokenizer(bare, special_tokens={"bos_token": BOS}).encode("hi")[0] != 0
    prepending = Tokenizer(bare, special_tokens={"bos_token": BOS}, add_bos=True)
    assert prepending.encode("hi") == with_processor.encode("hi")
    assert prepending.encode("hi", add_special_tokens=False) == with_processor.encode("hi")[1:]


def test_many_threads() -> None:
    tokenizer, generator = make(), random.Random(2)
    texts = ["".join(generator.choices(HARD, k=20)) for _ in range(60)]
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda text: tokenizer.encode(text, add_special_tokens=False), texts))
        assert list(pool.map(tokenizer.decode, ids)) == texts
        assert (
            list(pool.map(lambda one: "".join(streamed(tokenizer, one, [1] * len(one))), ids))
            == texts
        )


# ---- folders -------------------------------------------------------------------------------------


def test_folder(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (0, 1, (1, 2))
    assert tokenizer.vocab_size == 402 and tokenizer.has_chat_template
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
        == f"{BOS}<｜User｜>hi{ASSISTANT}"
    )


def test_ids_that_end_a_sequence(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer.from_folder(tmp_path).eos_ids == (1,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert Tokenizer.from_folder(tmp_path).eos_ids == (1, 3)
    (tmp_path / "tokenizer_config.json").unlink()
    bare = Tokenizer.from_folder(tmp_path)
    assert (bare.eos_id, bare.eos_ids, bare.bos_id, bare.has_chat_template) == (
        None,
        (3,),
        None,
        False,
    )


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "file {{ messages[0].content }} {{ eos_token }}", encoding="utf-8"
    )
    assert (
        Tokenizer.from_folder(tmp_path).apply_chat_template([{"role": "user", "content": "x"}])
        == f"file x {EOS}"
    )


def test_broken_files_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path)
    for name, content in (
        ("generation_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer.json", "{}"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=name):
            Tokenizer.from_folder(tmp_path)


def test_hook_opens_folders_with_a_tokenizer(tmp_path: Path) -> None:
    facts: Any = None
    assert open_tokenizer(path=tmp_path, facts=facts) is None
    write_folder(tmp_path / "model")
    (tmp_path / "model" / "model.gguf").touch()
    assert open_tokenizer(path=tmp_path / "model", facts=facts).vocab_size == 402
    assert open_tokenizer(path=tmp_path / "model" / "tokenizer.json", facts=facts).vocab_size == 402
    assert open_tokenizer(path=tmp_path / "model" / "model.gguf", facts=facts) is None


def test_same_as_transformers(tmp_path: Path) -> None:
    import transformers

    ours = Tokenizer.from_folder(write_folder(tmp_path))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    for text in HARD:
        assert ours.encode(text) == theirs.encode(text)
        ids = ours.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    roles = ("user", "assistant", "user")
    messages = [
        {"role": role, "content": text}
        for role, text in zip(roles, ("Grüße", "ok", "?"), strict=True)
    ]
    assert theirs.chat_template == CHAT
    for arguments in ({}, {"thinking": True}):
        assert ours.apply_chat_template(messages, **arguments) == theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **arguments
        )


def test_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, glowplug.core.text.stop_strings; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}, timeout=60, check=False
    )
    assert done.returncode == 0
