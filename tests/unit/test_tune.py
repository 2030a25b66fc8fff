"""`glowplug tune`: the GEMMs of a model, bounded time, resuming after a stop, and several
processes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.protocols.tuning import LayerShapes
from glowplug.core.startup.layer_shapes import layer_shapes
from glowplug.entrypoints.cli import tune_workers
from glowplug.entrypoints.cli.commands import tune
from glowplug.entrypoints.cli.main import main
from tests.support.tiny import write_config

PLUGIN = "tests.plugins.sleepy_tuner"
MODEL = ("--model", "tiny-v3", "--device", "cpu", "--plugin", PLUGIN)


class Clock:
    """A stand-in for the module ``time``: only a sleep moves it on."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(tune, "time", one)
    monkeypatch.setattr("tests.plugins.sleepy_tuner.time", one)
    return one


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins(entry_points=False)


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tables"
    folder.mkdir()
    monkeypatch.setenv("SLEEPY_TABLES", str(folder))
    return folder


def shapes_of(name: str, folder: Path, plugins: PluginSet) -> LayerShapes:
    plan = make_plan(
        {
            "model": str(write_config(folder, name)),
            "skip_tokenizer": True,
            "device": "cpu",
            "weights": {"use": "random"},
        },
        plugins=plugins,
    )
    return layer_shapes(plan, plugins)


def test_the_gemms_of_a_model_are_found_without_its_weights(
    plugins: PluginSet, tmp_path: Path
) -> None:
    found = shapes_of("v3", tmp_path, plugins)
    sizes = {(sum(shape.outputs), shape.inputs) for shape in found.linears}
    assert sizes == {
        (48 + 40, 64),
        (4 * 24, 48),
        (4 * 32, 32),
        (64, 64),
        (2 * 96, 64),
        (64, 96),
        (64, 64),
        (2 * 32, 64),
        (64, 32),
        (160, 64),
    }
    assert [(shape.count, shape.hidden, shape.inter) for shape in found.experts] == [(8, 64, 32)]
    assert (found.topk, found.quantized) == (3, frozenset())
    fp8 = shapes_of("v3_fp8", tmp_path / "fp8", plugins)
    assert any(name.endswith("o_proj") for name in fp8.quantized)
    assert "lm_head" not in fp8.quantized


def test_tuners_are_listed_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--plugin", PLUGIN]) == 0
    shown = capsys.readouterr().out
    assert "sleepy" in shown and "moe" in shown
    assert main(["tune", "sleepi", *MODEL]) == 2
    assert "no tuner 'sleepi'; available: " in capsys.readouterr().err


def test_every_table_is_filled_and_the_next_run_does_nothing(
    tables: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "sleepy", *MODEL, "--rows", "1", "4"]) == 0
    shown = capsys.readouterr().out
    written = sorted(tables.iterdir())
    assert len(written) >= 7 and all(
        set(json.loads(path.read_text())) == {"1", "4"} for path in written
    )
    assert "not complete" not in shown
    stamps = [path.stat().st_mtime_ns for path in written]
    assert main(["tune", "sleepy", *MODEL, "--rows", "1", "4"]) == 0
    assert [path.stat().st_mtime_ns for path in written] == stamps
    assert "rows" not in capsys.readouterr().out.replace("to measure", "")


def test_time_runs_out_and_another_run_goes_on(
    tables: Path, clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.plugins.sleepy_tuner.SECONDS", 0.3)
    assert main(["tune", "sleepy", *MODEL, "--max-minutes", "0.03"]) == 0
    assert 1.8 <= clock.now < 1.8 + 0.3, "the measurement during which time ran out was the last"
    assert "run the same command again to continue" in capsys.readouterr().out
    measured = sum(len(json.loads(path.read_text())) for path in tables.iterdir())
    assert measured == 6
    assert main(["tune", "sleepy", *MODEL]) == 0
    assert "not complete" not in capsys.readouterr().out
    assert all(set(json.loads(path.read_text())) == {"1", "8", "64"} for path in tables.iterdir())


def test_some_tables_only_and_a_list_measures_nothing(
    tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "sleepy", *MODEL, "--list"]) == 0
    labels = [
        line.partition(":")[0]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("N=")
    ]
    assert len(labels) >= 7 and list(tables.iterdir()) == []
    assert main(["tune", "sleepy", *MODEL, "--tables", labels[0], labels[1]]) == 0
    assert sorted(path.stem for path in tables.iterdir()) == sorted(labels[:2])


def test_a_model_without_experts_has_nothing_for_moe(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    assert main(["tune", "moe", "--model", "tiny-llama", "--device", "cpu"]) == 0
    assert "nothing for moe" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tuner", "more"),
    [
        ("moe", ()),
        ("fp8-gemm", ("--quantization", "block_fp8")),
        ("fp8-moe", ("--quantization", "block_fp8")),
        ("int8-gemm", ("--quantization", "w8a8_int8")),
        ("attention", ()),
    ],
)
def test_a_machine_without_a_card_measures_nothing(
    tuner: str, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    words = ["tune", tuner, "--model", "tiny-v3", "--device", "cpu", *more]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"{tuner} measures on cuda, and here the device is cpu" in said and "--list" in said
    assert main([*words, "--list"]) == 0


def test_a_fact_sheet_is_not_measured_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "sleepy", *MODEL, "--facts", "1xh200"]) == 2
    assert "not on a fact sheet's" in capsys.readouterr().err


def test_the_experts_tables_are_where_the_kernels_look(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    from glowplug.kernels.launch import tuned_tables as tuned
    from glowplug.kernels.moe.experts import ExpertsProblem

    assert (
        main(
            ["tune", "moe", "--model", "v2lite", "--device", "cpu", "--list", "--dtype", "bfloat16"]
        )
        == 0
    )
    shown = capsys.readouterr().out
    alone, riding = (
        ExpertsProblem(64 + shared, 6 + shared, 2048, 1408, "bfloat16").table_name
        for shared in (0, 2)
    )
    assert str(tuned.FOLDER / alone) in shown or str(tuned.FOLDER / riding) in shown


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from glowplug.plugins.quantization.tuning.dense_experts import rows_in

    path = tmp_path / "E=8.json"
    assert rows_in(path) == ()
    path.write_text('{"16": {}, "2": {}}')
    assert rows_in(path) == (2, 16)
    path.write_text("{")
    with pytest.raises(ValueError, match="E=8.json is not a table"):
        rows_in(path)


def test_processes_share_the_tables(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["tune", "sleepy", *MODEL, "--rows", "1", "--gpus", "2"]
    monkeypatch.setattr("sys.argv", ["glowplug", *words])
    assert main(words) == 0
    by = [json.loads(path.read_text())["1"]["by"] for path in tables.iterdir()]
    assert len(by) >= 7 and {"0", "1"} == set(by)
    assert abs(by.count("0") - by.count("1")) <= 1


def test_too_few_gpus_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ValueError, match="only 1 are visible"):
        tune_workers._cards(2)


def test_time_is_shared_out_over_what_is_missing(clock: Clock) -> None:
    given: list[float] = []

    class Noted:
        def tune(self, table: object, seconds: float, log: object) -> None:
            given.append(seconds)

    one = [
        tune.TuneTable(str(number), Path("x"), (1,), (1,) if number == 1 else ())
        for number in range(3)
    ]
    tune._measure(Noted(), one, 10.0)  # type: ignore[arg-type]
    assert given == pytest.approx([5.0, 10.0])


class FakeRay:
    """A cluster that runs each task at once, with the GPU that a real one would assign."""

    def __init__(self) -> None:
        self.options: dict[str, object] = {}

    def init(self, **options: object) -> None:
        self.options = options

    def remote(self, **needs: object) -> object:
        assert needs == {"num_gpus": 1}
        return lambda task: type("Task", (), {"remote": staticmethod(task)})

    def get(self, results: list[object]) -> list[object]:
        return results


def test_a_ray_cluster_shares_the_tables(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["tune", "sleepy", *MODEL, "--rows", "1", "--gpus", "2", "--ray"]
    monkeypatch.setattr("sys.argv", ["glowplug", *words])
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    assert main(words) == 0
    written = list(tables.iterdir())
    assert len(written) >= 7
    done = tune_workers._task(tune_workers._command([written[0].stem], 60.0))
    assert done == {str(written[0]): written[0].read_text()}, "the result of a task on another host"
