"""The load of ``bench serving``: ShareGPT's prompts, times of requests; and the compile time."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from glowplug.core.startup import compile_time
from glowplug.entrypoints import bench
from glowplug.entrypoints.bench.load import sharegpt
from glowplug.entrypoints.bench.load.load import Load, RampUp, gaps, load_of


def words(text: str) -> list[int]:
    """Return one token per word of ``text``."""
    return list(range(len(text.split())))


def talk(prompt: int, answer: int, name: str = "w") -> dict[str, object]:
    """Return a conversation whose two turns have these numbers of words."""
    turns = (" ".join([name] * prompt), " ".join(["a"] * answer))
    return {"conversations": [{"from": "human", "value": turn} for turn in turns]}


def file(folder: Path, *entries: object) -> Path:
    path = folder / "sharegpt.json"
    path.write_text(json.dumps(list(entries)))
    return path


def sizes(path: Path, count: int = 9, **choice: object) -> list[tuple[int, int]]:
    sampling = sharegpt.Sampling(**{"no_oversample": True, **choice})  # type: ignore[arg-type]
    found = sharegpt.prompts(path, count, words, sampling)
    return [(prompt.input_len, prompt.output_len) for prompt in found]


def test_sharegpt_keeps_what_the_published_filters_keep(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        talk(3, 9),
        talk(4, 3),
        talk(4, 4),
        talk(1024, 1024),
        talk(1024, 1025),
        talk(1025, 9),
        {"conversations": [{"from": "human", "value": "only one turn of five words"}]},
        {"id": "no conversation"},
        talk(20, 30),
    )
    assert sizes(path) == [(4, 4), (1024, 1024), (20, 30)]
    assert sizes(path, count=2) == [(4, 4), (1024, 1024)]
    assert sizes(path, output_len=2) == [(4, 2), (4, 2), (1024, 2), (1024, 2), (20, 2)]
    assert sizes(path, context_len=40) == [(4, 4)]
    assert sizes(path, context_len=1040) == [(4, 4), (1025, 9), (20, 30)]


def test_sharegpt_draws_again_when_too_few_conversations_pass(tmp_path: Path) -> None:
    path = file(tmp_path, *(talk(5 + i, 6) for i in range(3)))
    first = sharegpt.prompts(path, 40, words, sharegpt.Sampling(seed=3))
    again = sharegpt.prompts(path, 40, words, sharegpt.Sampling(seed=3))
    other = sharegpt.prompts(path, 40, words, sharegpt.Sampling(seed=4))
    assert first == again != other and len(first) == 40
    assert {prompt.input_len for prompt in first} == {5, 6, 7}
    assert len(sharegpt.prompts(path, 40, words, sharegpt.Sampling(no_oversample=True))) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ('{"conversations": []}', "is not the published JSON list"),
        ("[]", "no conversation"),
        (json.dumps([talk(2, 2)]), "passes the filters"),
    ],
)
def test_a_file_without_prompts_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        sharegpt.prompts(path, 1, words, sharegpt.Sampling())
    assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match="--tokenizer"):
        sharegpt.prompts(path, 1, None, sharegpt.Sampling())


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_sets_the_spread_of_gaps(burstiness: float, seed: int) -> None:
    drawn = gaps(Load(rate=50.0, burstiness=burstiness, seed=seed), 4000)
    assert sum(drawn) == pytest.approx(80.0)
    spread = statistics.pstdev(drawn) / statistics.mean(drawn)
    assert spread == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)
    assert gaps(Load(rate=50.0, burstiness=math.inf), 7) == pytest.approx([0.02] * 7)


@pytest.mark.parametrize(
    ("strategy", "middle"), [("linear", (2.0 + 32.0) / 2), ("exponential", math.sqrt(2.0 * 32.0))]
)
def test_a_ramp_up_rises_from_the_first_rate_to_the_last(strategy: str, middle: float) -> None:
    ramp = RampUp(strategy, 2.0, 32.0)
    assert [ramp.rate(i, 5) for i in (0, 2, 4)] == pytest.approx([2.0, middle, 32.0])
    equal = gaps(Load(burstiness=math.inf, ramp=ramp), 5)
    assert [equal[0], equal[2], equal[4]] == pytest.approx([0.5, 1 / middle, 1 / 32])
    drawn = gaps(Load(seed=5, ramp=RampUp(strategy, 10.0, 40.0)), 8000)
    assert statistics.mean(drawn[:200]) == pytest.approx(1 / 10, rel=0.25)
    assert statistics.mean(drawn[-200:]) == pytest.approx(1 / 40, rel=0.25)


def test_the_options_of_a_ramp_up_give_its_load() -> None:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    line = "serving --ramp-up-strategy exponential --ramp-up-start-rps 1 --ramp-up-end-rps 8"
    load = load_of(parser.parse_args([*line.split(), "--burstiness", "0.5"]), 4)
    assert load == Load(math.inf, 0.5, 4, 1, RampUp("exponential", 1.0, 8.0))


class TestCompileTime:
    """Compile time is that of this process since the start of the engine."""

    def test_times_of_torch_before_the_start_are_left_out(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        utils = ModuleType("torch._dynamo.utils")
        times = {compile_time.WHOLE_COMPILATION: [2.0], "bytecode_tracing": [1.5]}
        utils.compilation_time_metrics = times  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
        watch = compile_time.CompileTime("cpu")
        assert watch.seconds == 0.0
        times[compile_time.WHOLE_COMPILATION] += [0.5, 0.25]
        assert watch.seconds == pytest.approx(0.75)

    def test_kernels_inside_torch_compile_are_not_counted_twice(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        heard = []
        watch = compile_time.TritonTime(lambda **more: heard.append(more))
        watch(times=SimpleNamespace(total=1_500_000), metadata={}, cache_hit=False)
        monkeypatch.setattr(compile_time.CompileContext, "try_get", staticmethod(object))
        watch(times=SimpleNamespace(total=9_000_000), metadata={}, cache_hit=False)
        assert watch.seconds == pytest.approx(1.5)
        assert [more["cache_hit"] for more in heard] == [False, False]

    def test_the_variant_of_a_kernel_is_named(self) -> None:
        source = SimpleNamespace(
            fn=SimpleNamespace(arg_names=["x", "rows", "out", "stride", "BLOCK"]),
            constants={(4,): 64, (3,): 1},
            attrs={(0,): [["tt.divisibility", 16]], (2,): []},
        )
        wanted = " (constants: BLOCK=64, stride=1; not multiples of 16: rows, out)"
        assert compile_time.variant_of(source) == wanted
        assert compile_time.variant_of(None) == ""

    def test_kernels_that_requests_wait_for_are_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        watch = compile_time.TritonTime()
        one = {"times": SimpleNamespace(total=980_000), "metadata": {"name": "_settle"}}
        watch(**one, cache_hit=False)
        watch.serving = True
        watch(**one, cache_hit=True)
        assert not caplog.records
        watch(**one, cache_hit=False)
        assert [record.getMessage()[:58] for record in caplog.records] == [
            "requests waited 0.98 s for the compiler: kernel _settle ha"
        ]
