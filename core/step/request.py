"""Requests in the engine: sampling parameters and sequences. Torch is not imported."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from glowplug.core.errors import RequestError
from glowplug.core.step.structured import GrammarSpec, StructuredOutputsParams, grammar_spec

MAX_STOP_STRINGS = 16  #: most stop strings of a request
MAX_STOP_BYTES = 1024  #: most bytes of a stop string
MAX_STOP_TOKENS = 256  #: most stop token ids of a request
MAX_N = 128  #: most choices of a request
#: a smaller penalty can raise logits beyond float32
LEAST_REPETITION_PENALTY = 0.01
MAX_LOGPROBS = 20  #: largest number of most likely tokens in log-probabilities


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Parameters of sampling and of the end of generation.

    Field names and defaults are those of vLLM's ``SamplingParams``.

    Structured output is given by ``structured_outputs`` (vLLM's spelling) or by ``json_schema``,
    ``regex``, ``ebnf`` or ``structural_tag`` (SGLang's); ``grammar`` is what they become, and the
    only one of them that is kept.

    Attributes:
        n: number of choices; each is a sequence of its own.
        max_tokens: most tokens to generate; None: as many as the context allows.
        min_tokens: tokens before which neither eos nor a stop token ends the sequence.
        temperature: divisor of the logits; 0: greedy, the most likely token.
        top_p: the least likely tokens are left out whose probabilities are beyond this sum.
        top_k: number of most likely tokens to draw from; 0 or -1: all.
        min_p: least probability of a token, as a share of that of the most likely one.
        presence_penalty: subtracted from the logits of tokens that the output has.
        frequency_penalty: subtracted for each time that the output has the token.
        repetition_penalty: divisor of positive logits, and factor of negative ones, of tokens in
            prompt and output; 1: none.
        logit_bias: token id -> number added to its logit.
        allowed_token_ids: the only tokens that may be drawn; None: all.
        seed: seed of the random numbers; None: a random one.
        stop: texts that end the sequence; a single text may be given without a list.
        stop_token_ids: tokens that end the sequence.
        ignore_eos: the end-of-sequence token does not end the sequence.
        logprobs: k, for log-probabilities of the sampled token and of the k most likely; None: no
            log-probabilities.
        prompt_logprobs: the same for the tokens of the prompt.
        skip_special_tokens: special tokens are left out of the text.
        include_stop_str_in_output: the text includes the stop string that ended it.
        grammar: the structured output; set from the other fields.
        structured_outputs: structured output in vLLM's spelling.
        json_schema: JSON schema that the answer matches, as text or as an object.
        regex: regular expression that the whole answer matches.
        ebnf: grammar of the answer, EBNF as in llama.cpp, or Lark.
        structural_tag: structural tag, as text or as an object.
        ext: fields that components of the plan declare for requests, such as a policy's
            (``PolicyOffers.request_fields``).

    Raises:
        RequestError: a value is out of bounds; ``param`` names it.
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
    grammar: GrammarSpec | None = None
    structured_outputs: StructuredOutputsParams | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None
    ext: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check the fields.

        NOTE: a field that is its default object needs no check, which is the case for most fields
        of most requests.
        """
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        for name, default in _DEFAULTS:
            if getattr(self, name) is not default:
                _CHECKS[name](self, name)
        if self.min_tokens and self.max_tokens is not None:
            _between("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.min_tokens and self.grammar is not None:
            raise RequestError(
                "min_tokens cannot be used with structured output: the grammar decides where the "
                "answer ends",
                param="min_tokens",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def replace(self, **changes: Any) -> SamplingParams:
        return msgspec.structs.replace(self, **changes)


def _whole(low: int, high: int, optional: bool = False) -> _Check:
    def check(params: SamplingParams, name: str) -> None:
        value = getattr(params, name)
        if optional and value is None:
            return
        if type(value) is not int:
            raise RequestError(f"{name} must be a whole number, got {value!r}", param=name)
        _between(name, value, low, high)

    return check


def _number(low: float, high: float, above: bool = False) -> _Check:
    """Return a check for a number in [low, high]; with ``above``, ``low`` itself is refused."""

    def check(params: SamplingParams, name: str) -> None:
        value = getattr(params, name)
        # NOTE: numpy's floats cannot be encoded for another process.
        if isinstance(value, float) and type(value) is not float:
            msgspec.structs.force_setattr(params, name, value := float(value))
        _between(name, value, low, high)
        if above and value == low:
            raise RequestError(f"{name} must be in ({low:g}, {high:g}], got {value}", param=name)

    return check


def _switch(params: SamplingParams, name: str) -> None:
    if type(getattr(params, name)) is not bool:
        raise RequestError(
            f"{name} must be true or false, got {getattr(params, name)!r}", param=name
        )


def _stop(params: SamplingParams, name: str) -> None:
    _list_of(name, params.stop, str)
    if len(params.stop) > MAX_STOP_STRINGS:
        raise RequestError(
            f"at most {MAX_STOP_STRINGS} stop strings, got {len(params.stop)}", param=name
        )
    for text in params.stop:
        if not text:
            raise RequestError("a stop string must not be empty", param=name)
        if len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
            raise RequestError(f"a stop string must be at most {MAX_STOP_BYTES} bytes", param=name)


def _stop_token_ids(params: SamplingParams, name: str) -> None:
    _list_of(name, params.stop_token_ids, int)
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise RequestError(f"at most {MAX_STOP_TOKENS} stop_token_ids", param=name)


def _allowed_token_ids(params: SamplingParams, name: str) -> None:
    if params.allowed_token_ids is None:
        return
    _list_of(name, params.allowed_token_ids, int)
    if not params.allowed_token_ids:
        raise RequestError("allowed_token_ids must not be empty", param=name)


def _grammar(params: SamplingParams, name: str) -> None:
    if not isinstance(params.grammar, GrammarSpec):
        raise RequestError("grammar must be a GrammarSpec", param=name)


def _structured(kind: str) -> Callable[[SamplingParams, str], None]:
    """Return a check that moves a field of structured output to ``grammar``.

    ``kind``: kind of the grammar; "" for the field ``structured_outputs``.
    """

    def check(params: SamplingParams, name: str) -> None:
        value = getattr(params, name)
        if params.grammar is not None:
            raise RequestError(
                f"{name}: only one kind of structured output may be given", param=name
            )
        if kind:
            made = grammar_spec(kind, value, name)
        elif isinstance(value, StructuredOutputsParams):
            made = value.spec()
        else:
            raise RequestError(f"{name} must be StructuredOutputsParams", param=name)
        msgspec.structs.force_setattr(params, "grammar", made)
        msgspec.structs.force_setattr(params, name, None)

    return check


def _ext(params: SamplingParams, name: str) -> None:
    if params.ext is not None and not (
        isinstance(params.ext, dict) and all(isinstance(key, str) for key in params.ext)
    ):
        raise RequestError("ext must map names of fields to values", param=name)


def _logit_bias(params: SamplingParams, name: str) -> None:
    if params.logit_bias is None:
        return
    if not isinstance(params.logit_bias, dict):
        raise RequestError("logit_bias must map token ids to numbers", param=name)
    _list_of(name, list(params.logit_bias), int)
    for token, bias in params.logit_bias.items():
        _between(name, bias, -100.0, 100.0)
        _between(name, token, 0, 1 << 31)


def _list_of(name: str, values: list[Any], kind: type) -> None:
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        items = "strings" if kind is str else "token ids"
        raise RequestError(f"{name} must be a list of {items}, got {values!r:.200}", param=name)


def _between(name: str, value: float, low: float, high: float) -> None:
    if not (type(value) in (int, float) and math.isfinite(value) and low <= value <= high):
        raise RequestError(f"{name} must be between {low} and {high}, got {value!r}", param=name)


_Check = Callable[[SamplingParams, str], None]
_CHECKS: dict[str, _Check] = {
    "n": _whole(1, MAX_N),
    "max_tokens": _whole(1, 1 << 31, optional=True),
    "min_tokens": _whole(0, 1 << 31),
    "temperature": _number(0.0, 100.0),
    "top_p": _number(0.0, 1.0, above=True),
    "top_k": _whole(-1, 1 << 31),
    "min_p": _number(0.0, 1.0),
    "presence_penalty": _number(-2.0, 2.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "repetition_penalty": _number(LEAST_REPETITION_PENALTY, 100.0),
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_token_ids,
    "seed": _whole(-(1 << 63), (1 << 64) - 1, optional=True),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": _switch,
    "logprobs": _whole(0, MAX_LOGPROBS, optional=True),
    "prompt_logprobs": _whole(0, MAX_LOGPROBS, optional=True),
    "skip_special_tokens": _switch,
    "include_stop_str_in_output": _switch,
    "grammar": _grammar,
    "structured_outputs": _structured(""),
    "json_schema": _structured("json_schema"),
    "regex": _structured("regex"),
    "ebnf": _structured("grammar"),
    "structural_tag": _structured("structural_tag"),
    "ext": _ext,
}
_DEFAULTS = tuple((field.name, field.default) for field in msgspec.structs.fields(SamplingParams))


@dataclass(frozen=True)
class Admission:
    """The conditions under which a sequence is admitted and may run.

    Attributes:
        priority: smaller numbers run earlier under the priority policy.
        salt: prefix-cache salt; sequences share cached pages only under equal salts.
        timeout: seconds from arrival after which the sequence ends; 0: never.
        queue_timeout: seconds from arrival after which the sequence ends if it is still queued; 0:
            never.
    """

    priority: int = 0
    salt: str = ""
    timeout: float = 0.0
    queue_timeout: float = 0.0


DEFAULT_ADMISSION = Admission()  #: no priority, no salt, no limit in time


@dataclass(eq=False)
class Sequence:
    """One sequence in the scheduler. A request with ``n > 1`` is several sequences.

    Attributes:
        id: engine-wide number, assigned by the front end.
        prompt: int32 [prompt_len] token ids.
        params: sampling parameters with ``n == 1`` and with ``max_tokens`` and ``seed`` set.
        admission: priority, prefix-cache salt and limits in time.
        arrival: monotonic time of the sequence's arrival at the engine, in seconds.
        output: committed output token ids.
        row: row in the sequence table while running, else -1.
        expected_cached: prompt tokens that the prefix cache probably has, as far as the request
            router knows.
        cached_tokens: prompt tokens found in the prefix cache at first admission.
        preemptions: number of times it was preempted.
        stop_ids: token ids that end the sequence (eos unless ignored, and ``stop_token_ids``).
        started: monotonic time of this rank at which it first entered a row; None before.
        prefilled: True: the time of its first token has been reported.
        held_until: time before which the scheduling policy does not admit it; 0: at once.
        grammar: its compiled grammar (``core.engine.constraint.SequenceGrammar``); None: any token
            may follow.
    """

    id: int
    prompt: NDArray[np.int32]
    params: SamplingParams
    admission: Admission = DEFAULT_ADMISSION
    arrival: float = 0.0
    stop_ids: frozenset[int] = frozenset()
    output: list[int] = field(default_factory=list)
    row: int = -1
    expected_cached: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    started: float | None = None
    prefilled: bool = False
    held_until: float = 0.0
    grammar: Any = None

    @property
    def max_length(self) -> int:
        """Number of prompt and output tokens at which the sequence ends with reason "length"."""
        assert self.params.max_tokens is not None
        return len(self.prompt) + self.params.max_tokens

    def all_tokens(self) -> NDArray[np.int32]:
        """Return prompt and committed output, int32."""
        return np.concatenate([self.prompt, np.asarray(self.output, dtype=np.int32)])
