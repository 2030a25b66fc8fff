"""A trace names the phases of a step, and tracing leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.engine.profiling import Profiler
from glowplug.core.errors import RequestError
from tests.support.tiny import write_config

PHASES = {
    "schedule",
    "launch",
    "inputs",
    "plan sampling",
    "plan attention",
    "step",
    "draft",
    "forward",
    "logits",
    "accept",
    "sample",
    "results to host",
    "commit",
}


def traced(llm: LLM, folder: Path) -> list[dict[str, object]]:
    llm.control("profile_start", label="unit")
    llm.generate(
        [[5, 6, 7], [8, 9]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    )
    return json.loads((folder / llm.control("profile_stop")["file"]).read_text())["traceEvents"]  # type: ignore[no-any-return]


def test_phases_of_a_step_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOWPLUG_PROFILE_DIR", str(tmp_path / "traces"))
    with LLM(
        model=str(write_config(tmp_path, "v3")),
        device="cpu",
        weights={"use": "random"},
        skip_tokenizer=True,
        memory={"kv_tokens": 256},
    ) as llm:
        runner = llm._executor._engine.runner  # type: ignore[attr-defined]
        before = set(vars(runner)), set(vars(runner.sampler))
        for _ in range(2):  # a second trace equals the first
            events = traced(llm, tmp_path / "traces")
            names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
            assert set(names) >= PHASES
            assert names.count("launch") == names.count("commit") >= 3
            assert any(str(event.get("name")).startswith("aten::") for event in events)
            assert (set(vars(runner)), set(vars(runner.sampler))) == before


@pytest.mark.gpu
def test_a_trace_shows_host_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOWPLUG_PROFILE_DIR", str(tmp_path / "traces"))
    with LLM(
        model=str(write_config(tmp_path, "v3")),
        device="cuda",
        weights={"use": "random"},
        skip_tokenizer=True,
        memory={"kv_tokens": 1024},
    ) as llm:
        events = traced(llm, tmp_path / "traces")
    kinds = {str(event.get("cat")) for event in events}
    assert {"user_annotation", "kernel", "cuda_runtime"} <= kinds, kinds
    names = {str(event["name"]) for event in events if event.get("cat") == "user_annotation"}
    assert {"schedule", "launch", "step", "commit"} <= names


def test_a_result_passes_through_and_a_failure_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Part:
        def work(self, x: int) -> int:
            return 10 // x

    part = Part()
    monkeypatch.setenv("GLOWPLUG_PROFILE_DIR", str(tmp_path))
    profiler = Profiler(0, "cpu", [(part, "work", "dividing")])
    profiler.start({"label": "a"})
    assert part.work(5) == 2
    with pytest.raises(ZeroDivisionError):
        part.work(0)
    with pytest.raises(RequestError, match="already running"):
        profiler.start({})
    assert (tmp_path / profiler.stop({})["file"]).read_text().count('"dividing"') == 2
    assert vars(part) == {}
    with pytest.raises(RequestError, match="no profile"):
        profiler.stop({})


def test_a_trace_of_so_many_steps_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Part:
        def work(self) -> None:
            pass

    part = Part()
    monkeypatch.setenv("GLOWPLUG_PROFILE_DIR", str(tmp_path))
    profiler = Profiler(0, "cpu", [(part, "work", "stepping")])
    profiler.start({"label": "a", "num_steps": 2})
    part.work()
    assert not list(tmp_path.iterdir())
    part.work()
    (trace,) = tmp_path.iterdir()
    part.work()
    assert not vars(part)
    events = json.loads(trace.read_text())["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "user_annotation"] == [
        "stepping"
    ] * 2
    assert profiler.stop({}) == {"file": trace.name}
    with pytest.raises(RequestError, match="no profile"):
        profiler.stop({})
