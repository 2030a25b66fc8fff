"""The measurement of ``glowplug check --numeric``: the engine's run, then the reference's."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.startup.kv_cache_error import compared
from glowplug.core.step.request import SamplingParams
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.entrypoints.front.llm import LLM
from glowplug.entrypoints.numeric.reference import Reference, reference_plan
from glowplug.entrypoints.numeric.tolerance import Tolerance, tolerance_of

PROMPT_TOKENS = 24  #: tokens of each prompt
DECODED_TOKENS = 4  #: tokens behind each prompt that are computed in decode steps
#: texts from which the prompts are made
TEXTS = (
    "What is the difference between a comet and an asteroid, and which of the two has a tail when "
    "it comes close to the sun?",
    "def merge(left: list[int], right: list[int]) -> list[int]:\n    result = []\n    while left "
    "and right:\n        source = left if left[0] < right[0] else right\n",
    "Sort these numbers from the largest to the smallest: 41, 7, 93, 18, 66, 250, 3, 12, 77, 1024",
    "Die Würde des Menschen ist unantastbar. 人人生而自由，在尊严和权利上一律平等。 "
    "Все люди рождаются свободными и равными.",
)


@dataclass(frozen=True)
class EngineRun:
    """The engine's side of a measurement.

    Attributes:
        plan: the engine's plan.
        ids: token ids of the sequences, int32 [n, tokens]: prompts, then generated tokens.
        served: log-probabilities of the generated tokens as served, float32 [n, decoded + 1]; the
            last one's token is not among ``ids``.
        last: the last generated token of each sequence, int64 [n].
        streams: float32 [n, tokens, 1 + layers, hidden].
        logits: float32 [n, tokens, V].
        formats: input formats of GEMMs that round activations.
    """

    plan: EnginePlan
    ids: np.ndarray
    served: Tensor
    last: Tensor
    streams: Tensor
    logits: Tensor
    formats: tuple[str, ...]


@dataclass(frozen=True)
class PartError:
    """The error of one part of the model: the embeddings, a layer or the head.

    Attributes:
        part: name of the part.
        prefill: error over the prompts' tokens; NaN if a number is not finite.
        decode: error over the tokens of decode steps.
        permitted: median of the errors that are permitted for the tokens.
        ratio: the larger of the two errors, each token's as a multiple of what is permitted for it.
        drift: median distance of the stream from that of the reference's own run, relative to its
            size; of the head, that of the logits.
    """

    part: str
    prefill: float
    decode: float
    permitted: float
    ratio: float
    drift: float

    @property
    def passes(self) -> bool:
        return self.ratio <= 1


@dataclass(frozen=True)
class NumericReport:
    """The result of a measurement.

    Attributes:
        parts: embeddings, layers and head, in order.
        tolerance: the permitted errors.
        prompts: number of sequences.
        tokens: tokens of each.
        max_error: largest difference of a logit from the reference's.
        kl: median divergence of the logits from the reference's, in nats.
        kl_max: largest divergence.
        top1: share of tokens after which both have the same best next token.
        served_error: median difference of the log-probability of served tokens.
        served_tolerance: the most that this may be.
        failures: reasons why the check fails, in words; (): it passes.
    """

    parts: tuple[PartError, ...]
    tolerance: Tolerance
    prompts: int
    tokens: int
    max_error: float
    kl: float
    kl_max: float
    top1: float
    served_error: float
    served_tolerance: float
    failures: tuple[str, ...] = ()

    @property
    def first(self) -> PartError | None:
        """The first part whose error is larger than permitted; None if there is none."""
        return next((part for part in self.parts if not part.passes), None)


def measure(
    config: Mapping[str, Any], plugins: PluginSet, texts: Sequence[str] = TEXTS
) -> NumericReport:
    """Measure an engine's errors against the float32 reference.

    Args:
        config: keywords of ``LLM``.
        plugins: the loaded plugins.
        texts: texts from which the prompts are made; random tokens without a tokenizer.

    Raises:
        PlanRefused: the engine or its reference cannot run.
        RequestError: the engine cannot return its streams.
        ValueError: the model has no reference.
    """
    own = {name: value for name, value in config.items() if name != "plugins"}
    plan = reference_plan(own, plugins)
    run = _run_engine(config, texts)
    with Reference(plan, plugins, run.ids) as reference:
        return _report(run, reference, tolerance_of(run.plan, plugins, run.formats))


def _run_engine(config: Mapping[str, Any], texts: Sequence[str]) -> EngineRun:
    """Generate from the prompts as a server would, then compute the streams of the same tokens."""
    with LLM(**config) as llm:
        prompts = _prompts(llm.plan, llm.tokenizer, texts)
        tokens, served = _generated(llm, prompts)
        ids = np.concatenate([np.array(prompts), tokens[:, :-1]], axis=1)
        llm.control("flush")
        found = llm.control("streams", ids=ids.tolist(), decodes=DECODED_TOKENS)
        plan = llm.plan
    model = plan.facts.model
    shape = ids.shape
    return EngineRun(
        plan=plan,
        ids=ids.astype(np.int32),
        served=served,
        last=torch.from_numpy(tokens[:, -1]),
        streams=_tensor(found["streams"]).view(*shape, model.num_layers + 1, model.hidden_size),
        logits=_tensor(found["logits"]).view(*shape, -1),
        formats=tuple(found["formats"]),
    )


def _generated(llm: LLM, prompts: list[list[int]]) -> tuple[np.ndarray, Tensor]:
    """Return the greedy tokens after each prompt, int64 [n, m], and their log-probabilities."""
    params = SamplingParams(
        temperature=0.0, max_tokens=DECODED_TOKENS + 1, ignore_eos=True, logprobs=1
    )
    done = llm.generate(prompts, params, use_tqdm=False)
    scores = [one.logprobs.token for one in done if one.logprobs is not None]
    return np.array([one.token_ids for one in done]), torch.tensor(scores)


def _tensor(parts: Sequence[bytes]) -> Tensor:
    """Return float32 numbers from their bytes."""
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.float32)


def _prompts(
    plan: EnginePlan, tokenizer: Tokenizer | None, texts: Sequence[str]
) -> list[list[int]]:
    """Return prompts of equal length, at most ``PROMPT_TOKENS``."""
    if tokenizer is None:
        rng = random.Random(0)
        vocab = plan.facts.model.vocab_size
        prompts = [[rng.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in texts]
    else:
        prompts = [tokenizer.encode(text) for text in texts]
    sizes = plan.sizes
    most = min(sizes.context_length, sizes.chunk_size) - DECODED_TOKENS - sizes.width
    length = min(PROMPT_TOKENS, most, *map(len, prompts))
    if length < 1:
        raise ValueError(f"sequences of {sizes.context_length} tokens are too short for the check")
    return [prompt[:length] for prompt in prompts]


def _report(run: EngineRun, reference: Reference, allowed: Tolerance) -> NumericReport:
    """Run the reference beside the engine's streams and return the errors."""
    streams = run.streams
    embedded = reference.embedded()
    parts = [_part("embeddings", streams[:, :, 0], embedded, embedded, embedded, allowed, 0.0)]
    own = embedded
    for step in reference.layers(streams):
        own = step.own
        before = streams[:, :, step.layer]
        after = streams[:, :, step.layer + 1]
        added = step.from_engine - before
        parts.append(
            _part(
                f"layer {step.layer}", after, step.from_engine, added, own, allowed, allowed.layer
            )
        )
    wanted = reference.logits(own)
    local = reference.logits(streams[:, :, -1])
    parts.append(_part("head", run.logits, local, local, wanted, allowed, allowed.head))
    return _with_logits(run, wanted, tuple(parts), allowed)


def _part(
    name: str,
    found: Tensor,
    expected: Tensor,
    added: Tensor,
    own: Tensor,
    allowed: Tolerance,
    tolerance: float,
) -> PartError:
    """Return the error of one part, relative to the size of ``added``. Tensors are [n, tokens, N].

    Besides ``tolerance``, the rounding of the result itself to the compute dtype is permitted. It
    follows from the size of the whole stream, which may be far larger than what a layer adds.

    Args:
        name: name of the part.
        found: the engine's result.
        expected: the reference's result for the engine's input.
        added: the part of ``expected`` whose size the error is relative to.
        own: the result in the reference's own run.
        allowed: the permitted errors.
        tolerance: permitted error of this part.
    """
    size = added.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    error = (found - expected).norm(dim=-1) / size
    permitted = tolerance + allowed.stream * expected.norm(dim=-1) / size
    drift = (found - own).norm(dim=-1) / own.norm(dim=-1)
    prefill, decode = _by_step(error, allowed.share)
    ratios = _by_step(error / permitted, allowed.share)
    ratio = float("nan") if np.isnan(ratios).any() else max(ratios)
    return PartError(name, prefill, decode, float(permitted.median()), ratio, float(drift.median()))


def _by_step(errors: Tensor, share: float) -> tuple[float, float]:
    """Return the counted error of the prompts' tokens and that of the decoded ones."""
    return (
        counted(errors[:, :-DECODED_TOKENS], share),
        counted(errors[:, -DECODED_TOKENS:], share),
    )


def counted(errors: Tensor, share: float) -> float:
    """Return the largest of the errors of the better ``share`` of tokens; NaN if any is NaN."""
    ordered = errors.flatten().sort().values
    if bool(ordered.isnan().any()):
        return float("nan")
    return float(ordered[max(0, int(np.ceil(share * len(ordered))) - 1)])


def _with_logits(
    run: EngineRun, wanted: Tensor, parts: tuple[PartError, ...], allowed: Tolerance
) -> NumericReport:
    """Return the report with the errors of the logits and of what was served.

    ``wanted``: logits of the reference's own run, [n, tokens, V].
    """
    kl, _, same = compared(wanted.flatten(0, 1), run.logits.flatten(0, 1))
    served = _served_errors(run, wanted)
    report = NumericReport(
        parts=parts,
        tolerance=allowed,
        prompts=wanted.shape[0],
        tokens=wanted.shape[1],
        max_error=float((run.logits - wanted).abs().max()),
        kl=float(kl.median()),
        kl_max=float(kl.max()),
        top1=float(same.mean()),
        served_error=float(served.median()),
        served_tolerance=float(np.sqrt(2 * allowed.kl)),
    )
    return _judged(report)


def _served_errors(run: EngineRun, wanted: Tensor) -> Tensor:
    """Return the differences of served log-probabilities from the reference's, [n, decoded + 1]."""
    places = wanted[:, -DECODED_TOKENS - 1 :].log_softmax(-1)
    generated = torch.from_numpy(run.ids[:, -DECODED_TOKENS:].astype(np.int64))
    tokens = torch.cat([generated, run.last[:, None]], dim=1)
    return (places.gather(2, tokens[..., None])[..., 0] - run.served).abs()


def _judged(report: NumericReport) -> NumericReport:
    """Return the report with its failures in words."""
    failures = []
    if report.first is not None:
        failures.append(f"{report.first.part} is the first that differs")
    if not report.kl <= report.tolerance.kl:
        failures.append(
            f"the logits diverge by {report.kl:.2g} nats (median), {report.tolerance.kl:.2g} are "
            "permitted"
        )
    if not report.served_error <= report.served_tolerance:
        failures.append(
            f"served log-probabilities differ by {report.served_error:.2g} (median), "
            f"{report.served_tolerance:.2g} is permitted"
        )
    return replace(report, failures=tuple(failures))
