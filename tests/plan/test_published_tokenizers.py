"""Tokenizers of published folders without tokenizer.json: tiktoken's and SentencePiece's formats.

Each is compared with its own library where that is installed, on random texts.
"""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import FactsError, PlanRefused
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.testing.harness.fakes import TINY_V3, write_model
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.entrypoints.front.model_text import open_tokenizer
from glowplug.plugins.tokenizers import sentencepiece as plugin
from glowplug.plugins.tokenizers.tiktoken_runtime import KIMI, read_ranks

TEXT = (
    "We'll say Größe to the world, 東京 and 世界 123456 times.\r\n\r\n  THEY'RE here: don't stop! "
    "Ελληνικά, русский, العربية; the family 👩‍👩‍👧 walks and walks through the town. "
)
ALPHABET = "the wandGrößeHELLO東京世界'll\n\r   0123!?.,é\u0301日本ǅʰ👩‍👧<>|[]"
MESSAGES = [{"role": "user", "content": "hi 東京"}]
TEMPLATE = "{% for m in messages %}<|im_user|>{{ m.content }}{% endfor %}<|im_assistant|>"


def plan_of(folder: Path, plugins: PluginSet, **more: Any) -> EnginePlan:
    config = {"model": str(folder), "weights": {"use": "random"}, **more}
    return make_plan(config, plugins=plugins, hardware=read_sheet("cpu"))


def texts(seed: int, joined: bool = True) -> list[str]:
    """Return random texts. ``joined``: with joiners and combining characters."""
    rng = random.Random(seed)
    alphabet = [character for character in ALPHABET if joined or character not in "\u200d\u0301"]
    made = ["".join(rng.choices(alphabet, k=rng.randrange(1, 40))) for _ in range(300)]
    return [*made, *([TEXT] if joined else ()), "a", "東", "\n", "👩"]


# ---- tiktoken ------------------------------------------------------------------------------------


def trained_ranks(seed: int) -> dict[bytes, int]:
    """Return ranks of the 256 bytes, shuffled, and of the most frequent pairs of TEXT."""
    rng = random.Random(seed)
    order = rng.sample(range(256), 256)
    ranks = {bytes([byte]): rank for rank, byte in enumerate(order)}
    words = [[bytes([byte]) for byte in word.encode()] for word in TEXT.split(" ")]
    for _ in range(150):
        pairs = [pair for word in words for pair in zip(word, word[1:], strict=False)]
        best = max(sorted(set(pairs)), key=pairs.count)
        ranks.setdefault(b"".join(best), len(ranks))
        words = [merged(word, best) for word in words]
        if not any(len(word) > 1 for word in words):
            break
    return ranks


def merged(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    done: list[bytes] = []
    at = 0
    while at < len(word):
        whole = tuple(word[at : at + 2]) == pair
        done.append(b"".join(pair) if whole else word[at])
        at += 2 if whole else 1
    return done


def kimi_folder(folder: Path, seed: int = 1, **settings: Any) -> tuple[Path, dict[bytes, int]]:
    """Write a model folder as Kimi's: tiktoken.model, settings with added tokens, Python code."""
    write_model(folder, {**TINY_V3, "vocab_size": 512}, {"lm_head.weight": ("BF16", (512, 128))})
    ranks = trained_ranks(seed)
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    names = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 5: "<|im_assistant|>"}
    added = {
        str(len(ranks) + at): {"content": name, "special": at != 5} for at, name in names.items()
    }
    found = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "added_tokens_decoder": added,
        "chat_template": TEMPLATE,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(found))
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('the code was run')")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": len(ranks) + 2}))
    return folder, ranks


def opened(folder: Path, plugins: PluginSet) -> Tokenizer:
    found = plugins.hook.open_tokenizer(path=folder, facts=plugins.read_model(str(folder)).facts)
    assert isinstance(found, Tokenizer)
    return found


@pytest.fixture
def kimi(tmp_path: Path, plugins: PluginSet) -> tuple[Tokenizer, dict[bytes, int]]:
    folder, ranks = kimi_folder(tmp_path)
    return opened(folder, plugins), ranks


@pytest.mark.parametrize("seed", [3, 4])
def test_ids_are_those_of_tiktoken(tmp_path: Path, plugins: PluginSet, seed: int) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="the library to compare with")
    folder, ranks = kimi_folder(tmp_path, seed)
    tokenizer = opened(folder, plugins)
    special = {"[BOS]": len(ranks), "<|im_end|>": len(ranks) + 2}
    library = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens=special)
    for text in [*texts(seed), "[BOS]the<|im_end|>the"]:
        ids = tokenizer.encode(text)
        assert ids == library.encode(text, allowed_special="all"), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == library.decode(ids) == text


def test_text_is_merged_and_split_as_the_pattern_says(
    kimi: tuple[Tokenizer, dict[bytes, int]],
) -> None:
    tokenizer, ranks = kimi
    assert len(tokenizer.encode("the")) < 3, "frequent pairs are merged"
    for text in ("1234", "東京the", "theTHE"):  # the pattern separates these
        cut = {"1234": 3, "東京the": 2, "theTHE": 3}[text]
        assert tokenizer.encode(text) == tokenizer.encode(text[:cut]) + tokenizer.encode(text[cut:])
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts(5))
    assert max(tokenizer.encode(TEXT)) < len(ranks)


def test_special_tokens_have_the_ids_of_the_folder(
    kimi: tuple[Tokenizer, dict[bytes, int]],
) -> None:
    tokenizer, ranks = kimi
    first = len(ranks)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (first, (first + 1, first + 2))
    assert tokenizer.encode("<|im_user|>") == [first + 3]
    assert tokenizer.encode(f"<|reserved_token_{first + 4}|>") == [first + 4]
    assert tokenizer.vocab_size == 512
    ids = [first + 3, *tokenizer.encode("the"), first + 2]
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_user|>the<|im_end|>"
    assert tokenizer.decode([first + 5]) == "<|im_assistant|>", "an added token that is not special"


def test_the_folder_s_chat_template_is_used(kimi: tuple[Tokenizer, dict[bytes, int]]) -> None:
    text = kimi[0].apply_chat_template(MESSAGES)
    assert text == "<|im_user|>hi 東京<|im_assistant|>"


def test_a_stream_joins_the_bytes_of_a_character(
    kimi: tuple[Tokenizer, dict[bytes, int]],
) -> None:
    tokenizer, ranks = kimi
    for text in ("東京", "👩‍👩‍👧 walks", TEXT):
        ids = [ranks[bytes([byte])] for byte in text.encode()]  # a token for each byte
        stream = tokenizer.stream()
        pieces = [stream.feed([token]) for token in ids]
        assert "".join(pieces) + stream.finish() == text and "\ufffd" not in "".join(pieces)
    stream = tokenizer.stream()
    assert stream.feed(ids[:1]) + stream.feed([ranks[b"\xe6"]]) + stream.finish() == "W\ufffd"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no token for the byte 0"),
        (b"QQ== 0\nQQ== 1\n", "line 2: an empty token, or one that appears twice"),
        (b"QQ== 0\nQg== x\n", "line 2"),
        (b"!! 0\n", "line 1"),
        (b"QQ== 5\n", "the ranks are not 0 to 0"),
        (b"\x00\xff\n", "line 1"),
    ],
)
def test_a_damaged_rank_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (path := tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        read_ranks(path)
    assert "tiktoken.model" in str(caught.value)


def test_an_unknown_class_is_refused_without_running_its_code(
    tmp_path: Path, plugins: PluginSet
) -> None:
    folder, _ = kimi_folder(tmp_path, tokenizer_class="OtherTokenizer")
    with pytest.raises(PlanRefused) as caught:
        open_tokenizer(plan_of(folder, plugins, trust_remote_code=True), plugins)
    (refusal,) = caught.value.refusals
    assert "'OtherTokenizer'" in refusal.reason and "never run" in refusal.reason
    assert refusal.fix.startswith('state it as "pat_str" in tokenizer_config.json')
    kimi_folder(tmp_path, tokenizer_class="OtherTokenizer", pat_str=KIMI)
    assert open_tokenizer(plan_of(folder, plugins), plugins) is not None


def test_a_pattern_that_is_none_is_named(tmp_path: Path, plugins: PluginSet) -> None:
    folder, _ = kimi_folder(tmp_path, pat_str="(")
    with pytest.raises(ValueError, match="tokenizer_config.json: pat_str"):
        opened(folder, plugins)


# ---- SentencePiece -------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "bpe": {"model_type": "bpe", "byte_fallback": True},
    "unigram": {"model_type": "unigram", "byte_fallback": True},
    "bare": {
        "model_type": "unigram",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
    },
}


def spm_folder(folder: Path, kind: str = "llama", **settings: Any) -> Path:
    """Train a small SentencePiece model and write a model folder with it."""
    spm = pytest.importorskip("sentencepiece", reason="needs the extra sentencepiece")
    pytest.importorskip("google.protobuf", reason="needs the extra sentencepiece")
    write_model(folder, {**TINY_V3, "vocab_size": 400}, {"lm_head.weight": ("BF16", (400, 128))})
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 8),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=370,
        hard_vocab_limit=False,
        user_defined_symbols=["<tool>"],
        control_symbols=["<pad>"],
        minloglevel=2,
        **KINDS[kind],
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_sentencepiece(
    tmp_path: Path, plugins: PluginSet, kind: str
) -> None:
    folder = spm_folder(tmp_path, kind)
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer = opened(folder, plugins)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    # NOTE: the tables of normalization are applied to whole grapheme clusters by ``tokenizers``
    for text in texts(7, joined="normalization_rule_name" in KINDS[kind]):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == library.encode(text), text
        assert tokenizer.decode(ids) == library.decode(ids)
        stream = tokenizer.stream()
        assert "".join(stream.feed([token]) for token in ids) + stream.finish() == library.decode(
            ids
        )


def test_a_llama_tokenizer_begins_with_bos(tmp_path: Path, plugins: PluginSet) -> None:
    folder = spm_folder(tmp_path, tokenizer_class="LlamaTokenizer")
    tokenizer = opened(folder, plugins)
    assert tokenizer.encode("the")[0] == tokenizer.bos_id == 1
    (folder / "tokenizer_config.json").write_text("{}")
    assert opened(folder, plugins).encode("the")[0] != 1


def test_symbols_and_added_tokens_are_whole_tokens(tmp_path: Path, plugins: PluginSet) -> None:
    folder = spm_folder(tmp_path, legacy=False)
    plain = opened(folder, plugins)
    size = plain.vocab_size
    added = {str(size): {"content": "<|new|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"legacy": False, "added_tokens_decoder": added})
    )
    tokenizer = opened(folder, plugins)
    ids = tokenizer.encode("the<|new|>the<tool>", add_special_tokens=False)
    names = [tokenizer.backend.id_to_token(token) for token in ids]
    assert (names.count("<|new|>"), names.count("<tool>")) == (1, 1)
    assert names[names.index("<|new|>") + 1][0] != "\u2581", "legacy = false: no space after it"
    assert tokenizer.decode(ids) == "thethe<tool>"
    wrong = {str(size + 3): {"content": "<|new|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": wrong}))
    with pytest.raises(ValueError, match="the folder states"):
        opened(folder, plugins)


def test_bytes_of_a_character_are_joined(tmp_path: Path, plugins: PluginSet) -> None:
    tokenizer = opened(spm_folder(tmp_path), plugins)
    text = "日本語 ☃"  # not in the training text
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text), "bytes"
    stream = tokenizer.stream()
    pieces = [stream.feed([token]) for token in ids]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("content", [b"", b"\xff\xff\xff", b"QQ== 0\nQg== 1\n"])
def test_another_file_of_that_name_is_named(
    tmp_path: Path, plugins: PluginSet, content: bytes
) -> None:
    folder = spm_folder(tmp_path)
    (folder / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match="tokenizer.model: not a SentencePiece model"):
        opened(folder, plugins)


def test_a_missing_package_is_refused_with_the_fix(
    tmp_path: Path, plugins: PluginSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, TINY_V3, {"lm_head.weight": ("BF16", (512, 128))})
    (folder / "tokenizer.model").write_bytes(b"\n")
    monkeypatch.setattr(plugin, "installed", lambda name: "")
    with pytest.raises(FactsError, match="needs sentencepiece and protobuf"):
        opened(folder, plugins)
    with pytest.raises(PlanRefused) as caught:
        open_tokenizer(plan_of(folder, plugins), plugins)
    (refusal,) = caught.value.refusals
    assert 'pip install "glowplug[sentencepiece]"' in refusal.fix


def test_tokenizer_json_takes_precedence(tmp_path: Path, plugins: PluginSet) -> None:
    from glowplug.core.facts.model_folder import embedded_path

    folder, _ = kimi_folder(tmp_path)
    (folder / "tokenizer.json").write_bytes((embedded_path() / "tokenizer.json").read_bytes())
    embedded = Tokenizer.from_folder(embedded_path())
    found = opened(folder, plugins)
    assert found.backend.to_str() == embedded.backend.to_str()
