"""The tokenizer: text to token ids and back, and chat templates.

It uses the ``tokenizers`` library, neither torch nor transformers. A plugin for another format
builds the same :class:`Tokenizer` from its own ``tokenizers.Tokenizer``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from glowplug.core.errors import RequestError
from glowplug.core.text.chat_template import (
    ChatTemplate,
    check_arguments,
    cut_after_final_message,
)
from glowplug.core.text.detokenize import (
    ByteStream,
    Pieces,
    PrefixStream,
    StreamDecoder,
    is_byte_level,
)

#: arguments of a chat template that a request may set
TEMPLATE_ARGUMENTS = frozenset({"thinking", "enable_thinking", "reasoning_effort"})


class Tokenizer:
    """A tokenizer with chat templates. All methods may be called from several threads.

    Args:
        backend: the tokenizer of the ``tokenizers`` library.
        chat_template: source, or sources by name ("default", "tool_use").
        special_tokens: text of "bos_token", "eos_token" and the like; templates can read them.
        eos_ids: further ids that end a sequence.
        add_bos: True prepends bos even if the backend's post-processor does not.

    Attributes:
        vocab_size: the largest token id plus one.
        bos_id: id of the beginning-of-sequence token, or None.
        eos_id: id of the end-of-sequence token, or None.
        eos_ids: all ids that end a sequence, ``eos_id`` first.
        has_chat_template: the tokenizer has a chat template.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self._sources = (
            {"default": chat_template}
            if isinstance(chat_template, str)
            else dict(chat_template or {})
        )
        self._templates: dict[str, ChatTemplate] = {}
        self._special_text = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.vocab_size = max(
            backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1
        )
        self.bos_id = self._id_of("bos_token")
        self.eos_id = self._id_of("eos_token")
        first = () if self.eos_id is None else (self.eos_id,)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*first, *eos_ids)))
        self._prepend_bos = (
            bool(add_bos) and self.bos_id is not None and self._plain_ids("a")[:1] != [self.bos_id]
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Return the tokenizer of a model folder.

        It is read from ``tokenizer.json`` and, where present, ``tokenizer_config.json``,
        ``special_tokens_map.json``, ``chat_template.jinja``, ``generation_config.json`` and
        ``config.json``.

        Raises:
            ValueError: a file cannot be read; the message names it.
        """
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # NOTE: the library raises bare Exception
            raise ValueError(f"{folder / 'tokenizer.json'}: {error}") from None
        return cls.of_folder(backend, folder)

    @classmethod
    def of_folder(
        cls,
        backend: tokenizers.Tokenizer,
        folder: Path,
        defaults: Mapping[str, Any] | None = None,
    ) -> Tokenizer:
        """Return a tokenizer with the settings and the chat template of a model folder.

        Args:
            backend: the tokenizer of the ``tokenizers`` library.
            folder: the model's folder.
            defaults: settings that its files may leave out, named as in tokenizer_config.json.

        Raises:
            ValueError: a file cannot be read; the message names it.
        """
        config = {**(defaults or {}), **read_settings(folder)}
        named = (
            (name, _text_of(value)) for name, value in config.items() if name.endswith("_token")
        )
        return cls(
            backend,
            chat_template=_template_of(folder, config),
            eos_ids=_ends_of(folder),
            special_tokens={name: text for name, text in named if text},
            add_bos=config.get("add_bos_token"),
        )

    def _id_of(self, name: str) -> int | None:
        text = self._special_text.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def _plain_ids(self, text: str) -> list[int]:
        return list(self.backend.encode(text).ids)

    def settings(self) -> dict[str, Any]:
        """Return the settings as in a tokenizer_config.json.

        They are the special tokens as text, "add_bos_token", and the chat template. "bos_token",
        "eos_token", "pad_token" and "chat_template" are None where there is none.
        """
        adds_bos = self.bos_id is not None and self.encode("a")[:1] == [self.bos_id]
        return {
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
            **self._special_text,
            "add_bos_token": adds_bos,
            "chat_template": self._sources.get("default"),
        }

    # ---- text and ids ----------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``; special tokens written in it are recognised.

        Raises:
            RequestError: ``text`` contains lone surrogates.
        """
        try:
            ids = list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError):
            raise RequestError(
                "the text is not valid Unicode", code="invalid_unicode", param="prompt"
            ) from None
        return (
            [self.bos_id, *ids]
            if add_special_tokens and self._prepend_bos and self.bos_id is not None
            else ids
        )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``. Invalid UTF-8 becomes U+FFFD; unknown ids are left out."""
        if self.byte_level:
            pieces = self._shown if skip_special_tokens else self._pieces
            return b"".join([pieces[token] for token in ids]).decode("utf-8", "replace")
        return str(
            self.backend.decode(
                [token for token in ids if token >= 0], skip_special_tokens=skip_special_tokens
            )
        )

    def stream(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """Return an incremental decoder for one sequence."""
        if self.byte_level:
            return ByteStream(self._shown if skip_special_tokens else self._pieces)
        return PrefixStream(lambda ids: self.decode(ids, skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token in running text; b"" if it is unknown.

        A byte token of "é", for example, has one of its two bytes.
        """
        return self._pieces[token] if self.byte_level else self._bytes_of(token)

    @cached_property
    def byte_level(self) -> bool:
        return is_byte_level(self.backend.decoder)

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self.backend.id_to_token, ())

    @cached_property
    def _shown(self) -> Pieces:
        return Pieces(self.backend.id_to_token, self._special_ids)

    def _bytes_of(self, token: int) -> bytes:
        name = self.backend.id_to_token(token) if 0 <= token < 1 << 32 else None
        if name is None:
            return b""
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace("\u2581", " ").encode()

    # ---- conversations ---------------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        """Digest of the tokenizer, its settings and its chat templates, 16 hexadecimal digits."""
        own = [self._sources, self._special_text, self.eos_ids, self._prepend_bos]
        content = self.backend.to_str() + json.dumps(own, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def has_chat_template(self) -> bool:
        return bool(self._sources)

    @cached_property
    def template_arguments(self) -> frozenset[str]:
        """The arguments of TEMPLATE_ARGUMENTS that the chat template reads.

        The set is empty without a template, and for one that cannot be compiled.
        """
        try:
            return TEMPLATE_ARGUMENTS & self._template("default").variables
        except RequestError:
            return frozenset()

    def use_chat_template(self, source: str) -> None:
        """Use the template ``source`` for all later conversations, including those with tools."""
        self._sources = {"default": source}
        self._templates = {}
        self.__dict__.pop("template_arguments", None)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> str:
        """Return the prompt text of a conversation.

        The text must be encoded with ``add_special_tokens=False``.

        Args:
            messages: the messages.
            add_generation_prompt: end with the beginning of the assistant's next message.
            continue_final_message: end within the last message, for the model to continue it.
            tools: descriptions of tools.
            arguments: further variables for the template; TEMPLATE_ARGUMENTS lists the permitted
                names.

        Raises:
            RequestError: there is no template, an argument is not permitted, or the template fails
                (code ``template_error``).
        """
        check_arguments(
            arguments, TEMPLATE_ARGUMENTS, add_generation_prompt and continue_final_message
        )
        text = self._template("tool_use" if tools else "default").render(
            {
                **self._special_text,
                **arguments,
                "messages": list(messages),
                "tools": list(tools) if tools else None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return cut_after_final_message(text, messages) if continue_final_message else text

    def _template(self, name: str) -> ChatTemplate:
        name = name if name in self._sources else "default"
        if name not in self._sources:
            raise RequestError(
                "this model has no chat template: send a prompt instead of messages",
                code="no_chat_template",
                param="messages",
            )
        if name not in self._templates:
            self._templates[name] = ChatTemplate(self._sources[name])
        return self._templates[name]


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings in ``special_tokens_map.json`` and ``tokenizer_config.json``.

    Raises:
        ValueError: a file cannot be read; the message names it.
    """
    return {
        **_read_json(folder / "special_tokens_map.json"),
        **_read_json(folder / "tokenizer_config.json"),
    }


def read_added_tokens(folder: Path) -> dict[int, tokenizers.AddedToken]:
    """Return the added tokens of a model folder without ``tokenizer.json``, by id.

    They are those of ``added_tokens_decoder`` in tokenizer_config.json, or else those of
    added_tokens.json.

    Raises:
        ValueError: an entry is not valid; the message names the file.
    """
    path = folder / "tokenizer_config.json"
    entries = _read_json(path).get("added_tokens_decoder")
    if entries is None:
        path = folder / "added_tokens.json"
        entries = {token: text for text, token in _read_json(path).items()}
    found = {}
    try:
        for token, entry in entries.items():
            text = _text_of(entry)
            if not text or int(token) < 0:
                raise ValueError("no text, or a negative id")
            special = not isinstance(entry, dict) or bool(entry.get("special", True))
            found[int(token)] = tokenizers.AddedToken(text, special=special, normalized=False)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: added tokens: {error}") from None
    return found


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a JSON object")
    return found


def _text_of(value: Any) -> str | None:
    """Return the text of a special token: a string, or an object with ``content``.

    The result is None for any other value.
    """
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _ends_of(folder: Path) -> list[int]:
    """Return the ids that end a sequence, from ``generation_config.json`` or else ``config.json``.

    The files have one id or a list.
    """
    for name in ("generation_config.json", "config.json"):
        stated = _read_json(folder / name).get("eos_token_id")
        if stated is not None:
            ends = stated if isinstance(stated, list) else [stated]
            if not all(type(token) is int and 0 <= token < 1 << 31 for token in ends):
                raise ValueError(
                    f"{folder / name}: eos_token_id is {stated!r}, expected a token id or a "
                    "list of token ids"
                )
            return ends
    return []


def _template_of(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template of a model folder: a source, or sources by name; None without one.

    ``chat_template.jinja`` takes precedence over the entry in ``config``, which is a string or a
    list of named templates.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    entry = config.get("chat_template")
    if isinstance(entry, list):
        return {item["name"]: item["template"] for item in entry}
    return entry if isinstance(entry, str) else None
