"""The matrix of two ranks: a sample over gloo, its cells, their order, and failures of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glowplug import LLM, SamplingParams
from glowplug.core.errors import EngineDead
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.step.messages import Finished, StepOutput
from tests.gpu.cells import admitted, pairwise
from tests.gpu.combinations import TOKENS, Answers, Reference, prompts
from tests.gpu.rank_cells import PLUGINS, RankCell, layouts, rank_matrix, write_rank_models
from tests.gpu.rank_combinations import MATRIX, run
from tests.gpu.rank_pair import RankPair, answers_of

SAMPLED = 24  #: cells that a GPU run of the tests starts; the whole matrix is a command of its own
EACH = 37  #: of so many cells the tests plan one
#: on a CPU a step's results are not copied, and the next step's functions overwrite them
REPLAYING = RankCell("v3", "auto", graphs="replaying", overlap=False)


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins(PLUGINS, entry_points=False)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rank_models(tmp_path_factory.mktemp("small"), small=True)


@pytest.fixture(scope="module")
def on_cpu(small: Path) -> Iterator[Reference]:
    found = Reference(small, "cpu")
    yield found
    found.close()


@pytest.mark.timeout(600)  # a start of two processes, beside others
def test_the_ranks_of_a_sample_give_the_tokens_of_one(
    plugins: PluginSet, on_cpu: Reference, small: Path
) -> None:
    """One pair of processes runs all of them."""
    with RankPair(plugins) as pair:
        for cell in (
            replace(REPLAYING, layout="ep+dp", exchange="all_to_all_static", steps=1),
            RankCell("llama", "auto", chunked=True),
        ):
            outcome = run(cell, pair, plugins, on_cpu, small, "cpu")
            assert outcome.same == 1.0
            assert (outcome.accepted > 1) == (cell.steps > 0)
        assert pair.starts == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_pair_goes_on_after_a_failure(plugins: PluginSet, on_cpu: Reference, small: Path) -> None:
    cell = RankCell("v3_fp8", "auto", layout="ep", copies=4, steps=3, radix=False)
    config = REPLAYING.config(small, "cpu")
    config["graphs"] |= {"breaks": "decode 2 forward", "breaks_rank": 1}
    with RankPair(plugins) as pair:
        with pytest.raises(EngineDead, match="rank 1 failed"):
            pair.answers(make_plan(config, plugins=plugins), prompts(), TOKENS)
        outcome = run(cell, pair, plugins, on_cpu, small, "cpu")
        assert outcome.same == 1.0 and outcome.accepted > 1
        assert pair.starts == 2


class WrongPair:
    """Ranks that give one rank's answers, except that one of them is reversed."""

    def __init__(self, engine: LLM) -> None:
        self._engine = engine

    def answers(self, plan: object, prompts: list[list[int]], tokens: int) -> Answers:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=1)
        found = self._engine.generate(prompts, params)
        first = [one.token_ids for one in found]
        said = [one.logprobs.token for one in found if one.logprobs is not None]
        return Answers([first[0][::-1], *first[1:]], first, said, 0, 0)


def test_other_tokens_than_those_of_one_rank_are_detected(
    plugins: PluginSet, on_cpu: Reference, small: Path
) -> None:
    cell = RankCell("v3", "auto", layout="dp")
    pair: Any = WrongPair(on_cpu.engine(cell))
    with pytest.raises(AssertionError, match="worse than the reference's"):
        run(cell, pair, plugins, on_cpu, small, "cpu")


def test_an_error_of_a_request_is_the_failure_of_its_combination() -> None:
    ends = [Finished(0, "length"), Finished(1, "error", error="not finite")]
    with pytest.raises(AssertionError, match="not finite"):
        answers_of([[StepOutput(finished=[ends[0]])], [StepOutput(finished=[ends[1]])]], 1)


def test_the_matrix_has_every_layout_and_switch(plugins: PluginSet, tmp_path: Path) -> None:
    """The first cells of a run have every admitted value of each axis, beside every layout."""
    cells = rank_matrix(plugins, "cuda")
    assert len({cell.name for cell in cells}) == len(cells) > 2000
    kept, reasons = admitted(
        cells[::EACH], plugins, write_rank_models(tmp_path), "cuda", read_sheet("8xh200")
    )
    assert len(kept) + sum(reasons.values()) == len(cells[::EACH])
    assert len(kept) > len(cells[::EACH]) / 2, reasons
    first = MATRIX.order(kept)
    assert sorted(first, key=str) == sorted(kept, key=str)
    first = first[: len(pairwise(kept, 1))]
    assert len(first) < len(kept)
    for axis in fields(RankCell):
        pairs = [{(one.layout, getattr(one, axis.name)) for one in some} for some in (first, kept)]  # type: ignore[attr-defined]
        assert pairs[0] == pairs[1], axis.name


def test_layouts_have_the_exchanges_that_move_tokens(plugins: PluginSet) -> None:
    found = {(one.layout, one.exchange) for one in layouts(plugins) if not one.copies}
    assert {exchange for layout, exchange in found if layout == "ep"} == {
        "auto",
        "all_to_all",
        "all_to_all_static",
    }
    assert ("ep+dp", "push") in found and ("tp", "auto") in found and ("dp", "auto") in found


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_pairs_of_values_on_two_gpus(plugins: PluginSet, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    folder = write_rank_models(tmp_path)
    fitting, reasons = admitted(rank_matrix(plugins, "cuda")[::EACH], plugins, folder, "cuda")
    reference, failed = Reference(folder, "cuda"), []
    chosen = MATRIX.order(fitting)[:SAMPLED]
    with RankPair(plugins) as pair:
        for cell in chosen:
            try:
                run(cell, pair, plugins, reference, folder, "cuda")
            except Exception as error:
                failed.append(f"{cell.name}: {type(error).__name__}: {str(error)[:300]}")
    reference.close()
    print(
        f"{len(fitting)} admitted, {sum(reasons.values())} refused, {len(chosen)} run, "
        f"{len(failed)} failed"
    )
    assert not failed, "\n".join(failed)
