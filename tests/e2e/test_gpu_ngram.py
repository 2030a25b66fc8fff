"""N-gram drafts on a GPU: the tokens without drafts, and the gains of a CPU, replayed and eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM
from tests.e2e.test_ngram import GREEDY, SHAPES, VOCAB, prompts
from tests.plugins import accepting
from tests.support.tiny import write_config

pytestmark = pytest.mark.gpu


def run(folder: Path, **config: Any) -> tuple[list[list[int]], list[list[int]], list[str]]:
    """Return the tokens of each request, its gains in each step, and the replayed pieces."""
    base: dict[str, Any] = {
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "context_length": 256,
        "memory": {"kv_tokens": 4096},
        # with overlap, whether a row has drafts is known one step late, so gains would differ
        "scheduler": {"max_running_requests": 8, "overlap": False},
    }
    accepting.take()
    with LLM(model=str(folder), plugins=["tests.plugins.accepting"], **{**base, **config}) as llm:
        tokens = [one.token_ids for one in llm.generate(prompts(), GREEDY)]
        executor: Any = llm._executor
        graphs = getattr(executor._engine.runner.graphs, "_decode_graphs", {})
        pieces = [name for made in graphs.values() for one in made.values() for name in one.pieces]
    return tokens, accepting.take(), pieces


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["v3", "llama"])
def test_tokens_and_gains_are_those_of_a_cpu(tmp_path: Path, name: str, shape: str) -> None:
    folder = write_config(tmp_path / name, name, vocab_size=VOCAB)
    drafts = {"speculative": SHAPES[shape]}
    plain, _, _ = run(folder, device="cuda")
    host, gains, _ = run(folder, device="cpu", **drafts)
    eager, eager_gains, none = run(folder, device="cuda", graphs={"use": "eager"}, **drafts)
    sizes = {"use": "cuda_graph", "batch_sizes": [3, 8]}
    replayed, replayed_gains, pieces = run(folder, device="cuda", graphs=sizes, **drafts)
    scheduler = {"max_running_requests": 8, "overlap": True}
    late, _, _ = run(folder, device="cuda", graphs=sizes, scheduler=scheduler, **drafts)
    assert plain == host == eager == replayed == late
    assert gains == eager_gains == replayed_gains
    assert not none and {"draft", "forward", "accept greedy"} <= set(pieces)
