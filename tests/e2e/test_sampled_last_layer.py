"""Running only the sampled tokens of prompts through the last layer gives the results of running
all tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from tests.e2e.test_piecewise import BASE, COUNTS, LENGTHS, prompts, results
from tests.plugins import replaying_runtime
from tests.support.slow_cases import some_slow_rows
from tests.support.tiny import write_config

SIZES: dict[str, dict[str, Any]] = {"v2": {}, "v3": {}, "one_layer": {"num_hidden_layers": 1}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_cache": {"cache": {"use": "none"}},
    "page_1": {"attention": {"page_size": 1}},
    "chunks": {"scheduler": {"max_running_requests": 7, "chunk_size": 11}},
    "in_turn": {"scheduler": {"max_running_requests": 7, "overlap": False}},
    "many": {"scheduler": {"max_running_requests": 40}},
}


@pytest.fixture(scope="module", params=SIZES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, more = request.param, SIZES[request.param]
    return write_config(
        tmp_path_factory.mktemp(name),
        name if name in ("v2", "v3") else "v3",
        **{"num_hidden_layers": 2, **more},
    )


def engine(folder: Path, last_layer: str, replayed: bool = False, **config: Any) -> LLM:
    graphs = {
        "use": "replaying",
        "batch_sizes": [1, 2, 4],
        "prefill": True,
        "prefill_tokens": COUNTS,
    }
    scheduler = {**BASE["scheduler"], **config.pop("scheduler", {}), "last_layer": last_layer}
    return LLM(
        model=str(folder),
        plugins=["tests.plugins.replaying"],
        **{
            **BASE,
            **config,
            "scheduler": scheduler,
            "graphs": graphs if replayed else {"use": "eager"},
        },
    )


#: (model, case); each case runs with one of the larger models, and some with both
SLOW = [
    *(("v2", case) for case in ("no_cache", "in_turn", "many")),
    *(("v3", case) for case in ("page_1", "chunks")),
    *(("one_layer", case) for case in ("no_cache", "page_1", "in_turn")),
]


@pytest.mark.parametrize(
    ("folder", "case"),
    some_slow_rows([(model, case) for case in CASES for model in SIZES], SLOW),
    indirect=["folder"],
)
def test_the_same_tokens(folder: Path, case: str) -> None:
    with engine(folder, "all", **CASES[case]) as llm:
        want = results(llm)
    for replayed in (False, True):
        with engine(folder, "sampled", replayed, **CASES[case]) as llm:
            assert results(llm) == want
            assert not replayed or replaying_runtime.NEWEST[0].passed


def scored(llm: LLM, **params: Any) -> list[float]:
    """Return log-probabilities of the sampled and the most likely tokens, and of the prompts'
    tokens where requested.
    """
    asked = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=3, **params)
    found: list[float] = []
    for one in llm.generate(prompts(3), [asked] * len(LENGTHS)):
        for part in (one.logprobs, one.prompt_logprobs if params else None):
            found += [] if part is None else [*part.token, *np.ravel(part.top)]
    return found


@pytest.mark.parametrize("params", [{}, {"prompt_logprobs": 2}], ids=["tokens", "prompts_too"])
def test_the_same_log_probabilities(folder: Path, params: dict[str, int]) -> None:
    with engine(folder, "all") as llm:
        want = scored(llm, **params)
    for replayed in (False, True):
        with engine(folder, "sampled", replayed) as llm:
            found = scored(llm, **params)
        assert len(found) == len(want) > 16 * len(LENGTHS) - 1
        np.testing.assert_allclose(found, want, atol=2e-5)


def watched(llm: LLM) -> list[int]:
    """Record the number of tokens of each call of the last layer's feed-forward from now on."""
    last = llm._executor._engine.runner.model.layers[-1].feed_forward  # type: ignore[attr-defined]
    seen: list[int] = []
    forward = last.forward

    def counted(x: Any, batch: Any) -> Any:
        seen.append(len(x))
        return forward(x, batch)

    last.forward = counted
    return seen


def test_fewer_tokens_reach_the_last_layer(folder: Path) -> None:
    """Without this, the comparison of the two modes would be empty."""
    lines = [line for line in prompts(7) if len(line) > 3]
    for last_layer in ("all", "sampled"):
        with engine(folder, last_layer) as llm:
            seen = watched(llm)
            llm.generate(lines, SamplingParams(temperature=0.0, max_tokens=1))
        tokens = sum(map(len, lines))
        assert sum(seen) == tokens if last_layer == "all" else sum(seen) < tokens // 2
