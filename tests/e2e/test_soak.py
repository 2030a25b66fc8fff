"""``glowplug bench soak`` on a tiny model: what holds passes, what does not is named."""
from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from glowplug import LLM
from glowplug.entrypoints import bench
from glowplug.entrypoints.bench import soak
from tests.tiny import write_config


def options(tmp_path: Path, *words: str, tokens: int = 1024) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args([
        "soak", "--model", str(write_config(tmp_path, "v3")), "--load-format", "dummy", "--device", "cpu",
        "--max-running-requests", "16", "--max-total-tokens", str(tokens), "--context-length", "256", "--exact",
        "--output-file", str(tmp_path / "soak.json"), *words])


def outcome(tmp_path: Path, *words: str, tokens: int = 1024) -> tuple[int, dict]:
    status = bench.run(options(tmp_path, *words, tokens=tokens))
    return status, json.loads((tmp_path / "soak.json").read_text())


def test_a_short_soak_holds(tmp_path: Path) -> None:
    status, found = outcome(tmp_path, "--minutes", "0.07", "--pauses", "3")
    assert (status, found["failures"], found["answers_changed"]) == (0, [], 0)
    assert found["requests"] == sum(found["ends"].values()) > 20
    assert {"length", "given up"} <= set(found["ends"])
    assert found["least_free_share"] < 0.2
    assert len(found["samples"]) == 4
    assert all(sample["pages"]["free"] == sample["pages"]["total"] == 64 for sample in found["samples"])
    assert found["conditions"]["card"].startswith("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--disable-radix-cache",)])
def test_half_a_minute_leaves_nothing_behind(tmp_path: Path, more: tuple[str, ...]) -> None:
    status, found = outcome(tmp_path, "--minutes", "0.5", "--pauses", "10", "--host-growth-mib", "16",
                            *more, tokens=512)
    assert (status, found["failures"], found["answers_changed"]) == (0, [], 0)
    assert found["preemptions"] > 0


def soaking(tmp_path: Path, llm: LLM) -> soak.Soak:
    args = options(tmp_path, "--minutes", "0.02", "--pauses", "2")
    one = soak.Soak(llm, args)
    one.run()
    return one


def tiny(tmp_path: Path) -> LLM:
    return LLM(model=str(write_config(tmp_path, "v3")), weights={"use": "random"}, device="cpu", skip_tokenizer=True,
               memory={"kv_tokens": 1024}, context_length=256, scheduler={"max_running_requests": 8})


def test_a_lost_page_is_found(tmp_path: Path) -> None:
    with tiny(tmp_path) as llm:
        scheduler = llm._executor._engine.scheduler  # type: ignore[attr-defined]
        scheduler.pages.take(1)
        assert "pages accounted for" in " ".join(soaking(tmp_path, llm).failures)


def test_an_answer_that_changes_is_found(tmp_path: Path) -> None:
    with tiny(tmp_path) as llm:
        one = soaking(tmp_path, llm)
        assert one.failures == []
        one._answers[0] = one._answers[0][::-1]
        one._pause()
        assert one.answers_changed == 1 and "answered otherwise" in one.failures[0]


def test_growing_memory_is_found(tmp_path: Path) -> None:
    with tiny(tmp_path) as llm:
        one = soaking(tmp_path, llm)
        assert one.result()["failures"] == []
        one.samples[-1].device_claimed += 40 << 20
        assert one.result()["failures"] == ["device_claimed memory grew by 40.0 MiB"]
        assert one.growth()["device_claimed"] == 40.0


def test_an_engine_that_dies_is_a_failure_not_a_traceback(tmp_path: Path) -> None:
    with tiny(tmp_path) as llm:
        runner = llm._executor._engine.runner  # type: ignore[attr-defined]
        runner.launch = lambda batch: 1 / 0
        assert "ZeroDivisionError" in soaking(tmp_path, llm).failures[0]
