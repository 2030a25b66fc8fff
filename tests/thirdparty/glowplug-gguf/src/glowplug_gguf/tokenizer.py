"""A byte-level BPE tokenizer from GGUF metadata."""

from __future__ import annotations

from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as RawTokenizer,
    decoders,
    models,
    pre_tokenizers,
)

from glowplug.core.api import FactsError
from glowplug.core.text.tokenizer import Tokenizer
from glowplug_gguf.header import GgufHeader

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  #: token types
SHORT = {"unknown": "unk", "padding": "pad"}
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_from(header: GgufHeader) -> Tokenizer:
    """Return the engine's tokenizer over :func:`bpe_tokenizer`, with the file's chat template and
    end token.
    """
    get, tokens = header.metadata.get, header.metadata.get("tokenizer.ggml.tokens")
    special = {}
    for name in ("bos", "eos", "unknown", "padding"):
        index = get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(tokens, list) and isinstance(index, int) and 0 <= index < len(tokens):
            special[f"{SHORT.get(name, name)}_token"] = str(tokens[index])
    return Tokenizer(
        bpe_tokenizer(header),
        chat_template=str(get("tokenizer.chat_template", "")) or None,
        special_tokens=special,
        add_bos=bool(get("tokenizer.ggml.add_bos_token", False)),
    )


def bpe_tokenizer(header: GgufHeader) -> RawTokenizer:
    """Return the tokenizer of the file.

    Raises:
        FactsError: It is of another kind, or its lists do not fit together.
    """
    kind, tokens = (
        header.metadata.get("tokenizer.ggml.model"),
        header.metadata.get("tokenizer.ggml.tokens"),
    )
    merges = header.metadata.get("tokenizer.ggml.merges")
    types = header.metadata.get("tokenizer.ggml.token_type")
    if kind != "gpt2" or not isinstance(tokens, list) or not isinstance(merges, list):
        raise FactsError(
            f"{header.path}: tokenizer {kind!r} is not byte-level BPE with its merges",
            "use --skip-tokenizer and token ids, or the model's safetensors folder",
        )
    types = (
        types if isinstance(types, list) and len(types) == len(tokens) else [NORMAL] * len(tokens)
    )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pre = str(header.metadata.get("tokenizer.ggml.pre", "default"))
    tokenizer = RawTokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_pairs(header, vocabulary, merges),
            ignore_merges=pre == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = _splitter(header, pre)
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, type_ in zip(tokens, types, strict=True)
        if type_ == CONTROL
    ]
    extra = [
        AddedToken(token, special=False, normalized=False)
        for token, type_ in zip(tokens, types, strict=True)
        if type_ == USER_DEFINED
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(extra)
    return tokenizer


def _pairs(
    header: GgufHeader, vocabulary: dict[str, int], merges: list[Any]
) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, space, right = str(merge).partition(" ")
        if (
            not space
            or left not in vocabulary
            or right not in vocabulary
            or left + right not in vocabulary
        ):
            raise FactsError(
                f"{header.path}: merge {str(merge)[:40]!r} does not fit the vocabulary",
                "download the file again",
            )
        pairs.append((left, right))
    return pairs


def _splitter(header: GgufHeader, pre: str) -> Any:
    """Return the pre-tokenizer for llama.cpp's name ``pre``."""
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if pre in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "llama-bpe":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise FactsError(
        f"{header.path}: pre-tokenizer {pre!r} is not known here (smollm, gpt-2, llama-bpe are)",
        "use --skip-tokenizer and token ids, or the model's safetensors folder",
    )
