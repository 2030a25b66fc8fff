"""Admitted combinations start and give the torch reference's tokens: pairs of values on a GPU, a
few on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.plugin.registry import PluginSet, load_plugins
from tests.gpu.cells import AGREEING, MODELS, Cell, admitted, matrix, named, pairwise, write_models
from tests.gpu.combinations import Reference, run

SAMPLED = 24  #: cells that a GPU run of the tests starts; the whole matrix is a command of its own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("small"), small=True)


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins(AGREEING, entry_points=False)


@pytest.fixture(scope="module")
def on_cpu(small: Path) -> Iterator[Reference]:
    found = Reference(small, "cpu")
    yield found
    found.close()


@pytest.mark.parametrize(
    "cell",
    [
        Cell("v2", "torch_mla", chunked=True),
        Cell("v3", "torch_mla", steps=1, radix=False),
        Cell("v3_fp8", "torch_mla", overlap=False),
        Cell("llama", "torch_mha", quantization="block_fp8"),
        Cell("v2_awq", "torch_mla"),
        Cell("v3_int8", "torch_mla"),
        Cell("v2", "torch_mla", quantization="w8a8_int8"),
    ],
    ids=lambda cell: cell.name,
)
def test_the_comparison_holds_on_the_cpu(cell: Cell, on_cpu: Reference, small: Path) -> None:
    outcome = run(cell, on_cpu, small, "cpu")
    assert outcome.same > 0.99
    assert (outcome.accepted > 1) == (cell.steps > 0)


@pytest.mark.parametrize("spoil", ["tokens", "scores"])
def test_a_wrong_engine_is_detected(
    spoil: str, on_cpu: Reference, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faults are an attention that misses the first key, which tokens alone would hardly show,
    and wrong scores.
    """
    from glowplug.plugins.attention.mla.torch_runtime import TorchMla

    cell, planned = Cell("v2", "torch_mla"), TorchMla.plan_step
    reference = on_cpu.engine(cell)._executor._engine.runner.attention  # type: ignore[attr-defined]

    def short(self: TorchMla, batch: Any, graph: object) -> None:
        batch.first_key = int(self is not reference)
        planned(self, batch, graph)

    if spoil == "tokens":
        monkeypatch.setattr(TorchMla, "plan_step", short)
    else:
        scores = on_cpu.scores
        monkeypatch.setattr(
            on_cpu,
            "scores",
            lambda *asked: [
                [(own - 0.1, best - 0.1) for own, best in one] for one in scores(*asked)
            ],
        )
    with pytest.raises(AssertionError, match="worse than the reference's|log-probabilities are"):
        run(cell, on_cpu, small, "cpu")


def test_the_sample_covers_every_pair(plugins: PluginSet) -> None:
    cells = [replace(cell, model=model) for model in MODELS for cell in matrix(plugins, "cpu")[:24]]
    chosen = pairwise(cells, 3)
    for one, other in (("steps", "radix"), ("chunked", "overlap"), ("model", "steps")):
        want = {(getattr(cell, one), getattr(cell, other)) for cell in cells}
        assert {(getattr(cell, one), getattr(cell, other)) for cell in chosen} == want
    assert len(chosen) < len(cells) / 2
    assert len(pairwise(cells, 3, most=3)) == 3


def test_cells_that_cannot_run_are_left_out_with_the_reason(
    plugins: PluginSet, folder: Path
) -> None:
    asked = [Cell("v2", "torch_mla", steps=1), Cell("v3", "torch_mla", steps=1)]
    kept, reasons = admitted(asked, plugins, folder, "cpu")
    assert [cell.model for cell in kept] == ["v3"]
    assert list(reasons.values()) == [1]
    assert set(named(plugins, "attention", "cpu", "mha")) == {"torch_mha"}


@pytest.mark.gpu
@pytest.mark.timeout(900)  # 60 s on an idle GPU; beside other processes several times that
def test_every_pair_of_values_on_the_gpu(plugins: PluginSet, folder: Path) -> None:
    fitting, reasons = admitted(matrix(plugins, "cuda"), plugins, folder, "cuda")
    chosen = pairwise(fitting, 7, most=SAMPLED)
    reference, failed = Reference(folder, "cuda"), []
    for cell in chosen:
        try:
            run(cell, reference, folder, "cuda")
        except Exception as error:
            failed.append(f"{cell.name}: {type(error).__name__}: {str(error)[:300]}")
    reference.close()
    print(
        f"{len(fitting)} admitted, {sum(reasons.values())} refused, {len(chosen)} run, "
        f"{len(failed)} failed"
    )
    assert not failed, "\n".join(failed)
