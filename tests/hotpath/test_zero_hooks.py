"""No hook is called while tokens are served: hooks assemble the objects, which then run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pluggy
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.plugin.loading import BUILT_IN
from glowplug.core.plugin.registry import PluginSet
from tests.support.tiny import write_config
from tests.thirdparty.packages import FOLDER

TOKENS = 100


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The number of hook calls in this process, through any plugin manager."""
    counted: Counter[str] = Counter()
    original, original_each = pluggy.HookCaller.__call__, PluginSet.call_each

    def counting(self: pluggy.HookCaller, **kwargs: Any) -> Any:
        counted[self.name] += 1
        return original(self, **kwargs)

    def counting_each(self: PluginSet, hook: str, **kwargs: Any) -> Any:
        counted[hook] += 1
        return original_each(self, hook, **kwargs)

    monkeypatch.setattr(pluggy.HookCaller, "__call__", counting)
    monkeypatch.setattr(PluginSet, "call_each", counting_each)
    yield counted


#: sample of a third party -> slot and component
SAMPLES = {"deadline": ("policy", "deadline"), "ngram": ("speculative", "prompt_copy")}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("names", [(), ("deadline",), ("ngram",), tuple(SAMPLES)])
def test_no_hook_is_called_while_tokens_are_served(
    tmp_path: Path,
    calls: Counter[str],
    overlap: bool,
    names: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither by the built-in components nor by samples of third parties, whose plugins are loaded
    too.
    """
    for name in names:
        monkeypatch.syspath_prepend(str(FOLDER / f"glowplug-{name}" / "src"))
    chosen: dict[str, Any] = {slot: {"use": use} for slot, use in map(SAMPLES.__getitem__, names)}
    folder = write_config(tmp_path, "v3")
    with LLM(
        model=str(folder),
        plugins=[f"glowplug_{name}.plugin" for name in names],
        **chosen,
        weights={"use": "random"},
        skip_tokenizer=True,
        context_length=256,
        scheduler={"overlap": overlap, "chunk_size": 16},
        memory={"kv_tokens": 2048},
    ) as llm:
        assert calls["worker_started"] == 1, (
            "the counter does not see start-up, so it would see nothing else"
        )
        for slot, use in map(SAMPLES.__getitem__, names):
            found = llm.plan.choice(slot)
            assert (found.name, found.distribution == BUILT_IN) == (use, False)
        calls.clear()
        params = SamplingParams(
            temperature=0.7, max_tokens=TOKENS // 4, ignore_eos=True, logprobs=2
        )
        done = llm.generate(
            [[5 + i] * (8 + 9 * i) for i in range(4)], params
        )  # chunked, batched, joined and left
        assert sum(len(result.token_ids) for result in done) == TOKENS
        assert not calls, f"hooks were called while serving: {dict(calls)}"
