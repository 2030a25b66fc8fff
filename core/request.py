"""Requests as the engine knows them: sampling parameters, and a sequence. Imports without torch."""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from glowplug.core.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_N = 128
MAX_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How tokens are chosen and when generation ends. Field names and defaults follow vLLM's ``SamplingParams``.

    ``temperature=0`` is greedy. ``top_k`` 0 or -1: off. ``seed=None``: the engine draws one.
    ``max_tokens=None``: as many as the context holds. ``logprobs=k``: the sampled token's log-probability and the
    k most likely. Raises RequestError, naming ``param``, for a value out of bounds.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        self._check_types()
        _between("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _between("max_tokens", self.max_tokens, 1, 1 << 31)
        _between("min_tokens", self.min_tokens, 0, self.max_tokens if self.max_tokens is not None else 1 << 31)
        _between("temperature", self.temperature, 0.0, 100.0)
        _between("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}", param="top_p")
        _between("top_k", self.top_k, -1, 1 << 31)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        if self.repetition_penalty == 0.0:
            raise RequestError(
                f"repetition_penalty must be in (0, 100], got {self.repetition_penalty}", param="repetition_penalty")
        for token, bias in (self.logit_bias or {}).items():
            _between("logit_bias", bias, -100.0, 100.0)
            _between("logit_bias", token, 0, 1 << 31)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
        if self.seed is not None:
            _between("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", param="stop")
        for text in self.stop:
            if not text:
                raise RequestError("a stop string must not be empty", param="stop")
            if len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
                raise RequestError(f"a stop string must be at most {MAX_STOP_BYTES} bytes", param="stop")
        if len(self.stop_token_ids) > 256:
            raise RequestError("at most 256 stop_token_ids", param="stop_token_ids")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _between(name, value, 0, MAX_LOGPROBS)

    def _check_types(self) -> None:
        """What another process would not accept must not be sent to it. NumPy's floats become plain ones."""
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, float) and type(value) is not float:
                msgspec.structs.force_setattr(self, name, float(value))
        for name in _WHOLE:
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise RequestError(f"{name} must be a whole number, got {value!r}", param=name)
        for name in _SWITCHES:
            if type(getattr(self, name)) is not bool:
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}", param=name)
        _list_of("stop", self.stop, str)
        _list_of("stop_token_ids", self.stop_token_ids, int)
        _list_of("allowed_token_ids", self.allowed_token_ids or [], int)
        if not isinstance(self.logit_bias or {}, dict):
            raise RequestError("logit_bias must map token ids to numbers", param="logit_bias")
        _list_of("logit_bias", list(self.logit_bias or ()), int)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def replace(self, **changes: Any) -> SamplingParams:
        return msgspec.structs.replace(self, **changes)


_WHOLE = ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_SWITCHES = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")


def _list_of(name: str, values: list[Any], kind: type) -> None:
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        what = "strings" if kind is str else "token ids"
        raise RequestError(f"{name} must be a list of {what}, got {values!r:.200}", param=name)


def _between(name: str, value: float, low: float, high: float) -> None:
    if not (type(value) in (int, float) and math.isfinite(value) and low <= value <= high):
        raise RequestError(f"{name} must be between {low} and {high}, got {value!r}", param=name)


@dataclass(eq=False)
class Sequence:
    """One sequence in the scheduler's hands. ``n > 1`` is several sequences, made by the front.

    Attributes:
        id: engine-wide number given by the front.
        prompt: int32 [prompt_len] token ids.
        params: sampling parameters with ``n == 1``, ``max_tokens`` and ``seed`` filled in.
        priority: smaller runs earlier under the priority policy.
        salt: prefix-cache salt; sequences share cached pages only under equal salts.
        arrival: seconds (monotonic) at the front.
        output: committed output token ids.
        row: row in the sequence table while running, else -1.
        cached_tokens: prompt tokens found in the prefix cache at first admission.
        preemptions: how often its pages were taken back.
        stop_ids: token ids that end it (eos unless ignored, and ``stop_token_ids``).
        timeout, queue_timeout: seconds from arrival after which it ends (0: never); the latter only while queued.
    """

    id: int
    prompt: NDArray[np.int32]
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    arrival: float = 0.0
    stop_ids: frozenset[int] = frozenset()
    timeout: float = 0.0
    queue_timeout: float = 0.0
    output: list[int] = field(default_factory=list)
    row: int = -1
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def max_length(self) -> int:
        """Prompt and output tokens together at which it ends with reason "length"."""
        assert self.params.max_tokens is not None
        return len(self.prompt) + self.params.max_tokens

    def all_tokens(self) -> NDArray[np.int32]:
        """Prompt and committed output, int32."""
        return np.concatenate([self.prompt, np.asarray(self.output, dtype=np.int32)])
