"""Speed and accept length of an engine with drafts of one size, for `bench` and `tune speculative`.

Drafts are described by the published knobs: steps, topk and draft tokens; all zero: no drafts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glowplug.core.errors import GlowplugError
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.entrypoints.bench.load.datasets import custom_prompts

if TYPE_CHECKING:
    from glowplug.core.step.messages import Stats
    from glowplug.entrypoints.front.llm import LLM

WARM_TOKENS = 16  #: output tokens of the requests that warm up an engine
#: built-in prompts: tasks of kinds that the embedded model was trained on
QUESTIONS = (
    "What is 793 - 69?",
    "Reverse this list: Peter, Alice, Ivan, Laura, Ben, Julia",
    "Sort these numbers: 37, 140, 12, 999, 504",
    "Add 33 and 6.",
    "Copy this text: Q, D, G, A, X, L",
    "Count how often cup occurs: cup, cup, nail, nail, nail",
    "Look up rope in this list: rope: 8, doll: 70, snake: 82, silver: 64",
    "Sort from largest to smallest: 532, 924, 192, 302",
    "What's 96 + 82?",
    "Count the words: storm river candle",
    "How much is 745 - 90?",
    "Repeat this: friend cup orange",
)
ALGORITHM = "nextn"  #: the speculative algorithm if the configuration names none


@dataclass(frozen=True)
class DraftSpeed:
    """The measured speed of decoding.

    Attributes:
        accept_length: tokens gained by a row in a step, the mean; 1 without drafts.
        step_seconds: seconds of a decode step, the mean; steps that compute prompts do not count.
        tokens_per_s: output tokens per second after the first token of each request.
        output_tokens: output tokens of a request, the mean.
    """

    accept_length: float
    step_seconds: float
    tokens_per_s: float
    output_tokens: float


def settings(
    steps: Sequence[int], topk: Sequence[int], draft_tokens: Sequence[int]
) -> list[DraftShape]:
    """Return the sizes of drafts that the knobs' values make, in order, each once.

    Combinations that make no drafts are left out, as are chains (topk 1) whose tokens are not steps
    + 1, and trees with more tokens than candidates. ``0, 0, 0`` are no drafts.
    """
    found: dict[DraftShape, None] = {}
    for one, branches, tokens in itertools.product(steps, topk, draft_tokens):
        if (one, branches, tokens) == (0, 0, 0):
            found[NO_DRAFTS] = None
        elif min(one, branches, tokens) > 0:
            shape = DraftShape(one, branches, tokens)
            whole = tokens == one + 1 if branches == 1 else branches <= tokens
            if whole and tokens <= shape.candidates + 1:
                found[shape] = None
    return list(found)


def drafting_config(
    config: dict[str, Any], shape: DraftShape, rows: int, rates: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return ``config`` with drafts of one size, for ``rows`` requests at a time.

    The speculative algorithm is the configuration's, else ``ALGORITHM``. There is no prefix cache,
    so that each run computes its prompts.

    ``rates``: acceptance to simulate, by position; None: the model's own. A size has those of its
    passes.
    """
    given = config.get("speculative", {})
    drafts: dict[str, Any] = {"use": "none"}
    if shape.steps:
        knobs = {"steps": shape.steps, "topk": shape.topk, "draft_tokens": shape.tokens}
        use = given.get("use", ALGORITHM)
        drafts = {**given, "use": ALGORITHM if use == "none" else use, **knobs, "adaptive": False}
        drafts.pop("cost_table", None)
        if rates is not None:
            drafts["simulate_accept_rates"] = list(rates[: shape.steps])
            config = {**config, "benchmark": True}
    return {
        "cache": {"use": "none"},
        **config,
        "scheduler": {**config.get("scheduler", {}), "max_running_requests": rows},
        "speculative": drafts,
    }


def read_prompts(llm: LLM, path: Path | None, count: int) -> list[list[int]]:
    """Return ``count`` prompts as token ids: those of a JSON-lines file, else built-in questions.

    The built-in questions are rendered with the model's chat template, and used again from the
    start if there are not enough.

    Raises:
        GlowplugError: the model has no tokenizer.
        ValueError: the file has no prompt.
    """
    if llm.tokenizer is None:
        raise GlowplugError("prompts need the model's tokenizer: leave skip_tokenizer out")
    if path is not None:
        return [llm.tokenizer.encode(one.text) for one in custom_prompts(path, count, 0)]
    texts = [
        llm.tokenizer.apply_chat_template([{"role": "user", "content": question}])
        for question in itertools.islice(itertools.cycle(QUESTIONS), count)
    ]
    return [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]


def measure_drafts(
    llm: LLM, prompts: list[list[int]], rows: int, output_len: int, width: int
) -> DraftSpeed:
    """Decode ``prompts`` greedily, ``rows`` at a time, and return the speed.

    Each group of ``rows`` prompts runs twice: for one token, and for all. The difference is that of
    decoding.

    Args:
        llm: the engine.
        prompts: token ids of the prompts.
        rows: requests at a time.
        output_len: output tokens of each request.
        width: tokens that a row computes in a step.
    """
    one, whole = _Total(), _Total()
    for begin in range(0, len(prompts), rows):
        group = prompts[begin : begin + rows]
        one.run(llm, group, 1)
        whole.run(llm, group, output_len)
    tokens = whole.tokens - one.tokens
    seconds = max(whole.seconds - one.seconds, 1e-9)
    steps = max(whole.steps - one.steps, 1)
    rounds = whole.drafted / (width - 1) if width > 1 else 0.0
    return DraftSpeed(
        accept_length=1 + whole.accepted / rounds if rounds else 1.0,
        step_seconds=seconds / steps,
        tokens_per_s=tokens / seconds,
        output_tokens=whole.tokens / len(prompts),
    )


class _Total:
    """The totals of several runs."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = self.steps = self.drafted = self.accepted = 0

    def run(self, llm: LLM, prompts: list[list[int]], output_len: int) -> None:
        """Generate ``output_len`` tokens for each prompt and add the run to the totals."""
        from glowplug.core.step.request import SamplingParams

        before = settled_stats(llm)
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        begun = time.perf_counter()
        done = llm.generate(prompts, params, use_tqdm=False)
        self.seconds += time.perf_counter() - begun
        after = settled_stats(llm)
        self.tokens += sum(len(one.token_ids) for one in done)
        self.steps += after.steps - before.steps
        self.drafted += after.drafted_tokens - before.drafted_tokens
        self.accepted += after.accepted_tokens - before.accepted_tokens


def settled_stats(llm: LLM) -> Stats:
    """Return the statistics of an idle engine after its last step."""
    for _ in range(2):  # a turn's statistics may follow the reply of the same turn
        llm.control("check")
    stats: Stats = llm.stats
    return stats
