"""The error of a cache format, measured on the CPU with a backend that rounds the cached values,
and its consequences.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glowplug import LLM
from glowplug.core.engine.runner import Runner
from glowplug.core.errors import GlowplugError
from glowplug.core.facts.kv_layout import KVLayout
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.offers import Mode
from glowplug.core.startup import kv_cache_error
from glowplug.core.startup.components import make_worker
from glowplug.core.startup.kv_cache_error import CacheError, Lend, cache_error, check_cache
from glowplug.core.startup.memory_fit import RankMemory
from glowplug.core.step.batch import Batch, shape_of
from glowplug.core.step.kv_pool import KVPool
from tests.support.tiny import write_config


def engine(folder: Path, name: str = "v3", **config: Any) -> LLM:
    base: dict[str, Any] = {
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "memory": {"kv_tokens": 4096},
        "dtype": "float32",
        "attention": {"use": "torch_mla"},
    }
    model = write_config(folder, name, num_nextn_predict_layers=1)
    return LLM(str(model), plugins=("tests.plugins.teacher",), device="cpu", **{**base, **config})


def parts(llm: LLM) -> tuple[Runner, EnginePlan, Lend]:
    """Return the engine's parts for another measurement; the engine cannot continue afterwards."""
    runner = llm._executor._engine.runner  # type: ignore[attr-defined]
    memory = RankMemory(llm.plan, make_worker(llm.plan, 0))

    def lend(layout: KVLayout, pages: int) -> None:
        memory._reserve(
            KVPool(layout, pages, llm.plan.device),
            runner.attention,
            runner.speculative,
            runner.sampler,
        )

    return runner, llm.plan, lend


def measured(folder: Path, to: str | None, **config: Any) -> CacheError:
    attention = {"use": "torch_mla"} if to is None else {"use": "rounded_mla", "to": to}
    with engine(folder, attention=attention, **config) as llm:
        found = cache_error(*parts(llm))
        assert found is not None
        return found


@pytest.mark.parametrize("name", ["v2", "v3", "v3_fp8"])
def test_formats_cost_what_they_round(name: str, tmp_path: Path) -> None:
    exact, half, narrow, narrower = (
        measured(tmp_path, to) for to in (None, "bfloat16", "float8_e4m3fn", "float8_e5m2")
    )
    assert exact.kl == 0.0 and exact.cosine > 1 - 1e-9 and exact.top1 == 1.0
    assert half.kl < narrow.kl / 10 and narrow.kl < narrower.kl / 2
    assert (
        narrow.kl < 0.02
        and narrow.prompts == kv_cache_error.MAX_PROMPTS * kv_cache_error.PROMPT_ROUNDS
    )


def test_drafts_do_not_change_it(tmp_path: Path) -> None:
    plain = measured(tmp_path, "float8_e4m3fn")
    drafted = measured(
        tmp_path, "float8_e4m3fn", speculative={"use": "nextn", "adaptive": False, "steps": 2}
    )
    assert drafted.kl == pytest.approx(plain.kl, rel=0.8) and drafted.prompts == plain.prompts


@pytest.mark.parametrize("drafts", [False, True])
def test_the_gates_last_step_decodes(
    drafts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rounding of a decoding kernel counts. The tokens are the gate's, and the reference logits
    those of a step of prompts.
    """
    pairs: list[tuple[Mode, torch.Tensor, torch.Tensor]] = []
    with engine(
        tmp_path,
        **({"speculative": {"use": "nextn", "adaptive": False, "steps": 1}} if drafts else {}),
    ) as llm:
        runner, plan, lend = parts(llm)
        plain = runner.logits

        def both(batch: Batch) -> torch.Tensor:
            prompts = replace(batch, mode=Mode.PREFILL, num_decodes=0)
            prompts.agreed = shape_of(prompts)
            pairs.append((batch.mode, plain(batch), plain(prompts)))
            return pairs[-1][1]

        monkeypatch.setattr(runner, "logits", both)
        cache_error(runner, plan, lend)
    assert len(pairs) == 2 * kv_cache_error.PROMPT_ROUNDS
    for mode, found, expected in pairs:
        assert mode is (Mode.PREFILL if drafts else Mode.DECODE)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_short_sequences_are_not_measured(tmp_path: Path) -> None:
    with engine(tmp_path, context_length=8) as llm:
        runner, plan, lend = parts(llm)
        assert cache_error(runner, plan, lend) is None
        assert "not measured" in (
            check_cache(runner, replace(plan, kv_dtype="fp8_e4m3"), lend) or ""
        )


def test_a_step_of_few_tokens_is_enough(tmp_path: Path) -> None:
    found = measured(tmp_path, None, scheduler={"chunk_size": 20, "max_running_requests": 3})
    assert found.prompts == kv_cache_error.PROMPT_ROUNDS and found.tokens == 20 and found.kl == 0.0


@pytest.mark.parametrize("bound,refused", [(1e-12, True), (10.0, False), (None, False)])
def test_an_error_beyond_the_bound_is_refused(
    bound: float | None, refused: bool, tmp_path: Path
) -> None:
    attention = {"use": "rounded_mla", "to": "float8_e5m2", "kv_error": bound}
    with engine(tmp_path, attention=attention) as llm:
        runner, plan, lend = parts(llm)
        assert check_cache(runner, plan, lend) is None, "a cache of 16 bits or more is not measured"
        narrow = replace(plan, kv_dtype="fp8_e5m2")
        if refused:
            with pytest.raises(
                GlowplugError,
                match=r"fp8_e5m2 changes .* too much: KL .* at most 1e-12 nats .*"
                r"Fix: attention.kv_dtype = \"auto\"",
            ):
                check_cache(runner, narrow, lend)
        else:
            assert "fp8_e5m2 cache error: KL" in (check_cache(runner, narrow, lend) or "")


def test_numbers_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path) as llm:
        runner, plan, lend = parts(llm)
        plain = runner.logits
        monkeypatch.setattr(
            runner, "logits", lambda batch: torch.full_like(plain(batch), float("nan"))
        )
        with pytest.raises(GlowplugError, match="KL nan"):
            check_cache(runner, replace(plan, kv_dtype="fp8_e4m3"), lend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton_mla", "auto"])
def test_on_a_gpu(backend: str) -> None:
    """The embedded model is well within the bound; a bound of zero refuses to start."""
    attention = {"kv_dtype": "fp8_e4m3", **({} if backend == "auto" else {"use": backend})}
    with LLM("embedded", device="cuda", attention=attention) as llm:
        found = cache_error(*parts(llm))
    print(found)
    assert found is not None and 0 < found.kl < 0.2
    with pytest.raises(GlowplugError, match="changes this model's logits too much"):
        LLM("embedded", device="cuda", attention={**attention, "kv_error": 1e-12})
