"""Output speed of layouts of ranks that differ in the size of one strategy, by concurrent requests.

Each layout has an engine of its own. At each number of requests, as many random prompts of one
length are generated at once, so that all of them run until the end.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from glowplug.core.errors import GlowplugError

if TYPE_CHECKING:
    from glowplug.core.plan.plan import EnginePlan
    from glowplug.entrypoints.front.llm import LLM

WARM_TOKENS = 16  #: output tokens of the requests that warm up an engine


@dataclass(frozen=True)
class LayoutLoad:
    """The requests that every layout is measured with.

    Attributes:
        concurrency: numbers of concurrent requests, ascending.
        input_len: tokens of a prompt.
        output_len: output tokens of a request.
        repeat: measured runs at each number of requests.
    """

    concurrency: Sequence[int]
    input_len: int
    output_len: int
    repeat: int


@dataclass
class MeasuredLayouts:
    """The results of several layouts.

    Attributes:
        speeds: requests -> size of the strategy -> output tokens per second, the median of all
            runs.
        failed: size -> reason why the layout was not measured, or not at every number of requests.
        plan: the plan of a layout that has started; None if none has.
    """

    speeds: dict[int, dict[int, float]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    plan: EnginePlan | None = None


def layout_config(
    config: Mapping[str, Any], strategy: str, size: int, requests: int
) -> dict[str, Any]:
    """Return the configuration of one layout.

    Args:
        config: the operator's configuration; its section of the strategy is replaced.
        strategy: name of the strategy.
        size: its size; 1: the layout without it.
        requests: most concurrent requests, the limit of running requests if none is given.
    """
    listed = [dict(section) for section in config.get("parallel", [])]
    others = [section for section in listed if section.get("use") != strategy]
    own = next((section for section in listed if section.get("use") == strategy), {})
    sized = [{**own, "use": strategy, "size": size}] if size > 1 else []
    return {
        **config,
        "parallel": [*others, *sized],
        "scheduler": {"max_running_requests": requests, **config.get("scheduler", {})},
        "skip_tokenizer": True,
    }


def measure_layouts(
    configs: Mapping[int, Mapping[str, Any]], load: LayoutLoad, show: Callable[[int, str], None]
) -> MeasuredLayouts:
    """Measure one layout after the other.

    A layout that fails keeps the numbers of requests measured before, and the next one is measured.

    Args:
        configs: configuration of each layout, by the size of the strategy.
        load: the requests.
        show: function that shows a line of text about the layout of a size.
    """
    from glowplug.entrypoints.front.llm import LLM

    found = MeasuredLayouts()
    for size, config in configs.items():
        at = "start"
        try:
            with LLM(**config) as llm:
                found.plan = llm.plan
                rng = random.Random(llm.plan.seed)
                for requests in load.concurrency:
                    at = f"{requests} requests"
                    speed = _speed(llm, requests, load, rng)
                    found.speeds.setdefault(requests, {})[size] = round(speed, 2)
                    show(size, f"{at}: {speed:.1f} output tokens/s")
        # Any failure of a layout is recorded; the comparison goes on.
        except Exception as error:
            found.failed[size] = f"{at}: {error or type(error).__name__}"
            show(size, f"failed at {found.failed[size]}")
    return found


def _speed(llm: LLM, requests: int, load: LayoutLoad, rng: random.Random) -> float:
    """Return the output tokens per second of ``requests`` requests, the median of all runs."""
    _run(llm, requests, load.input_len, min(WARM_TOKENS, load.output_len), rng)
    runs = [_run(llm, requests, load.input_len, load.output_len, rng) for _ in range(load.repeat)]
    return requests * load.output_len / median(runs)


def _run(llm: LLM, requests: int, input_len: int, output_len: int, rng: random.Random) -> float:
    """Generate ``output_len`` tokens for each of ``requests`` new prompts and return the seconds.

    Raises:
        GlowplugError: a request ended early.
    """
    from glowplug.core.step.request import SamplingParams

    vocab = llm.plan.facts.model.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(input_len)] for _ in range(requests)]
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    begun = time.perf_counter()
    done = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    ended = sorted({str(one.finish_reason) for one in done if len(one.token_ids) != output_len})
    if ended:
        raise GlowplugError(f"requests ended before {output_len} tokens: {', '.join(ended)}")
    return seconds
