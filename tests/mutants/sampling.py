"""Faults planted in samplers and output parsers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from glowplug.core.protocols import Piece, Worker
from glowplug.core.testing.suites.parser import Case, ParserSuite
from glowplug.core.testing.suites.sampler import SamplerSuite
from glowplug.plugins.outputs.deepseek_r1 import DeepseekR1Options
from glowplug.plugins.outputs.deepseek_r1_runtime import DeepseekR1
from glowplug.plugins.sampling.torch_sampler import TorchSamplerOptions
from glowplug.plugins.sampling.torch_sampler_runtime import TorchSampler
from tests.mutants.framework import Mutant, Planter

# ---- samplers ------------------------------------------------------------------------------------


class Sampling(SamplerSuite):
    def make(self) -> Any:
        plan: Any = SimpleNamespace(seed=0)
        return TorchSampler(TorchSamplerOptions(), plan, Worker())


sampling = Planter("sampling", Sampling)


def ignored(by: str, **values: Any) -> Mutant:
    """Return the mutant that replaces parameters of every request."""

    def join(correct: Any, row: int, params: Any, *rest: Any) -> None:
        correct(row, params.replace(**values), *rest)

    return sampling.swap(f"{', '.join(values)} ignored", by, "join", join)


def sampled(fault: str, by: str, change: Any) -> Mutant:
    """Return the mutant whose results are changed."""

    def sample(correct: Any, *given: Any, **named: Any) -> Any:
        found = correct(*given, **named)
        change(found)
        return found

    return sampling.swap(fault, by, "sample", sample)


def _by_row(sample: Any, logits: Any, rows: Any, positions: Any, ahead: Any = None) -> Any:
    """The place in the batch decides, in addition to seed and position."""
    return sample(logits, rows, positions + torch.arange(len(rows)) % 3, ahead)


def _first_join() -> Any:
    joined: dict[int, set[int]] = {}

    def join(correct: Any, row: int, *rest: Any) -> None:
        rows = joined.setdefault(id(correct.__self__), set())
        if row not in rows:
            rows.add(row)
            correct(row, *rest)

    return join


def _poisoned(found: Any) -> None:
    if found.bad.any():
        found.tokens = torch.zeros_like(found.tokens)


def _shifted(found: Any) -> None:
    if found.logprobs is not None:
        found.logprobs.token = found.logprobs.token + 0.01


SAMPLING = [
    ignored("test_temperature", temperature=1.0),
    ignored("test_top_k", top_k=-1),
    ignored("test_top_p", top_p=1.0),
    ignored("test_min_p", min_p=0.0),
    ignored("test_repetition_penalty", repetition_penalty=1.0),
    ignored("test_frequency_and_presence_penalty", frequency_penalty=0.0),
    ignored("test_frequency_and_presence_penalty", presence_penalty=0.0),
    ignored("test_logit_bias", logit_bias=None),
    ignored("test_allowed_token_ids", allowed_token_ids=None),
    ignored("test_min_tokens", min_tokens=0),
    ignored("test_seed_and_position_decide", seed=7),
    ignored("test_logprobs_are_of_the_raw_distribution", logprobs=0),
    sampling.swap(
        "rows are mixed up",
        "test_independent_of_the_batch",
        "sample",
        lambda sample, x, rows, p, a=None: sample(x, rows.flip(0), p, a),
    ),
    sampling.swap(
        "the position is ignored",
        "test_temperature",
        "sample",
        lambda sample, x, rows, p, a=None: sample(x, rows, p * 0, a),
    ),
    sampling.swap(
        "the place in the batch decides", "test_independent_of_the_batch", "sample", _by_row
    ),
    sampling.swap(
        "drafts ahead are not counted",
        "test_tokens_ahead_count_like_observed_ones",
        "sample",
        lambda sample, x, rows, p, a=None: sample(x, rows, p),
    ),
    sampling.swap(
        "tokens are not observed",
        "test_observed_tokens_count_like_joined_ones",
        "observe",
        lambda observe, *given: None,
    ),
    sampling.swap(
        "a row keeps its last owner's state", "test_rows_start_afresh", "join", _first_join()
    ),
    sampled(
        "NaN is not reported", "test_a_bad_row_costs_only_itself", lambda found: found.bad.zero_()
    ),
    sampled("a bad row spoils the others", "test_a_bad_row_costs_only_itself", _poisoned),
    sampled(
        "the second best is greedy", "test_greedy_is_argmax", lambda found: found.tokens.add_(1)
    ),
    sampled(
        "log-probabilities are too large", "test_logprobs_are_of_the_raw_distribution", _shifted
    ),
]

# ---- parsers -------------------------------------------------------------------------------------

OPENED = "<｜Assistant｜><think>\n"


class Parsing(ParserSuite):
    def make(self) -> Any:
        no_plan: Any = None
        return DeepseekR1(DeepseekR1Options(), no_plan, Worker())

    def cases(self) -> Sequence[Case]:
        whole = "<think>\nfirst\n\nsecond \n</think>\n\nThe answer.\n"
        parts = [("reasoning", "first\n\nsecond"), ("content", "The answer.\n")]
        return [
            Case(whole, parts),
            Case(whole.removeprefix("<think>\n"), parts, OPENED),
            Case(
                "plain text < and <thin", [("content", "plain text < and <thin")], "<｜Assistant｜>"
            ),
            Case("cut in the tag </thin", [("reasoning", "cut in the tag </thin")], OPENED),
            Case("<think>über 日本</think>é", [("reasoning", "über 日本"), ("content", "é")]),
        ]


outputs = Planter("outputs", Parsing)


def parsed(fault: str, by: str, feed: Any = None, finish: Any = None) -> Mutant:
    """Return the mutant whose parsers feed or finish otherwise.

    ``feed``: function of (correct feed, text); ``finish``: of (correct finish).
    """

    def start(correct: Any, *given: Any) -> Any:
        inner = correct(*given)
        return SimpleNamespace(
            feed=(lambda text: feed(inner.feed, text)) if feed else inner.feed,
            finish=(lambda: finish(inner.finish)) if finish else inner.finish,
        )

    return outputs.swap(fault, by, "start", start)


def _shared() -> Any:
    kept: list[Any] = []

    def start(correct: Any, *given: Any) -> Any:
        kept[:] = kept or [correct(*given)]
        return kept[0]

    return start


def _quadratic(correct: Any, *given: Any) -> Any:
    inner = correct(*given)
    whole = [""]

    def feed(text: str) -> list[Piece]:
        whole[0] += text
        for _ in range(0 if len(whole[0]) < 1000 else 9):
            whole[0].count("</think>")
        found: list[Piece] = inner.feed(text)
        return found

    return SimpleNamespace(feed=feed, finish=inner.finish)


OUTPUTS = [
    parsed("the end is lost", "test_whole", finish=lambda finish: finish() and []),
    parsed("the end is repeated", "test_whole", finish=lambda finish: finish() * 2),
    parsed(
        "white space is stripped", "test_every_split", feed=lambda feed, text: feed(text.strip())
    ),
    parsed(
        "each piece is a parse of its own",
        "test_every_split",
        feed=lambda feed, text: [Piece("content", text)],
    ),
    parsed(
        "characters are lost between chunks",
        "test_character_by_character",
        feed=lambda feed, text: feed(text) if len(text) != 1 or text != "<" else [],
    ),
    parsed(
        "reasoning is content",
        "test_whole",
        feed=lambda feed, text: [Piece("content", one.text) for one in feed(text)],
    ),
    parsed(
        "an empty text has a piece",
        "test_empty",
        finish=lambda finish: [*finish(), Piece("content", "")],
    ),
    outputs.swap("requests share a parser", "test_sequences_are_independent", "start", _shared()),
    outputs.swap(
        "the prompt's end is ignored",
        "test_whole",
        "start",
        lambda start, tail, thinking=None: start("", thinking),
    ),
    outputs.swap("the whole text is searched again", "test_time_is_linear", "start", _quadratic),
]
MUTANTS = [*SAMPLING, *OUTPUTS]
