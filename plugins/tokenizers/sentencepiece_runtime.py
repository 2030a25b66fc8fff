"""SentencePiece models (BPE and unigram) as tokenizers of the ``tokenizers`` library.

The package ``sentencepiece`` has the description of the file's format
(``sentencepiece_model.proto``); the file is data, and no code of the folder is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as Backend,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from glowplug.core.text.tokenizer import Tokenizer, read_added_tokens, read_settings

MAX_BYTES = 64 << 20  #: size limit of a model file
SPACE = "\u2581"  #: character that stands for a space in pieces
UNIGRAM, BPE = 1, 2  #: TrainerSpec.ModelType
CONTROL, USER_DEFINED = 3, 4  #: SentencePiece.Type


def read_tokenizer(folder: Path, file: str) -> Tokenizer:
    """Return the tokenizer of a folder.

    Args:
        folder: the model's folder.
        file: name of the model file.

    Raises:
        ValueError: a file is damaged, or the model is of a kind other than BPE and unigram; the
            message names the file.
    """
    settings = read_settings(folder)
    proto = _read(folder / file)
    backend = Backend(_model(proto, folder / file))
    spec = proto.normalizer_spec
    first_only = settings.get("legacy") is False and spec.add_dummy_prefix
    backend.normalizer = normalizers.Sequence(_normalizers(spec, first_only))
    if first_only:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=SPACE, prepend_scheme="first", split=False
        )
    backend.decoder = _decoder(spec.add_dummy_prefix)
    backend.add_tokens(
        [
            AddedToken(piece.piece, special=piece.type == CONTROL, normalized=False)
            for piece in proto.pieces
            if piece.type in (CONTROL, USER_DEFINED)
        ]
    )
    _add_named(backend, folder)
    trained = proto.trainer_spec
    return Tokenizer.of_folder(
        backend,
        folder,
        defaults={
            "bos_token": _piece(proto, trained.bos_id),
            "eos_token": _piece(proto, trained.eos_id),
            "unk_token": _piece(proto, trained.unk_id),
            "add_bos_token": str(settings.get("tokenizer_class", "")).startswith("Llama"),
        },
    )


def _read(path: Path) -> Any:
    """Return the content of a model file (``ModelProto``)."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path}: larger than {MAX_BYTES >> 20} MiB")
    messages: Any = sentencepiece_model_pb2  # classes that are made at import
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise ValueError(f"{path}: not a SentencePiece model: {error}") from None
    if not proto.pieces:
        raise ValueError(f"{path}: not a SentencePiece model: it has no pieces")
    return proto


def _model(proto: Any, path: Path) -> Any:
    """Return the library's model of the pieces."""
    trained = proto.trainer_spec
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    ids = {name: number for number, (name, _) in enumerate(pieces)}
    if len(ids) != len(pieces):
        raise ValueError(f"{path}: a piece appears twice")
    if trained.model_type == UNIGRAM:
        return models.Unigram(pieces, trained.unk_id, trained.byte_fallback)
    if trained.model_type == BPE:
        return models.BPE(
            vocab=ids,
            merges=_merges(pieces, ids),
            unk_token=pieces[trained.unk_id][0],
            fuse_unk=True,
            byte_fallback=trained.byte_fallback,
        )
    raise ValueError(f"{path}: models of type {trained.model_type} are not supported")


def _merges(pieces: list[tuple[str, float]], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece, best score first."""
    found = []
    for name, score in pieces:
        for at in range(1, len(name)):
            left, right = name[:at], name[at:]
            if left in ids and right in ids:
                found.append((-score, ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _normalizers(spec: Any, first_only: bool) -> list[Any]:
    """Return the steps before the model.

    NOTE: the library applies the table of characters to whole grapheme clusters, so a cluster with
    joiners or combining characters may be normalized otherwise than by SentencePiece. Models whose
    table is empty ("identity", as in Llama) are not affected.

    Args:
        spec: the model's ``NormalizerSpec``.
        first_only: the space before a text is added at its beginning only, by a pre-tokenizer, and
            not after each special token.
    """
    found: list[Any] = []
    if spec.precompiled_charsmap:
        found.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        found += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if first_only:
        return found
    if spec.add_dummy_prefix:
        found.append(normalizers.Prepend(SPACE))
    return [*found, normalizers.Replace(" ", SPACE)]


def _decoder(dummy_prefix: bool) -> Any:
    """Return the decoder. ``dummy_prefix``: the space before a text is taken away."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if dummy_prefix else steps)


def _add_named(backend: Backend, folder: Path) -> None:
    """Add the tokens that the folder's JSON files name, which must have the ids stated there.

    Raises:
        ValueError: a token has another id.
    """
    for token, added in sorted(read_added_tokens(folder).items()):
        backend.add_tokens([added])
        found = backend.token_to_id(added.content)
        if found != token:
            raise ValueError(
                f"{folder}: the added token {added.content!r} has the id {found} after the pieces, "
                f"the folder states {token}"
            )


def _piece(proto: Any, token: int) -> str | None:
    return proto.pieces[token].piece if 0 <= token < len(proto.pieces) else None
