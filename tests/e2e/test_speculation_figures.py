"""The acceptance of drafts as clients see it: in answers, in /server_info and in /metrics, equal to
what follows from the tokens of each step; and simulated acceptance through the whole engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.errors import PlanRefused
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.step.draft_counts import Acceptance, rates_of_length, since
from glowplug.core.step.messages import total
from glowplug.core.testing.harness.ranks import RankSet, rank_plan, submit
from glowplug.entrypoints.front.model_text import open_tokenizer
from glowplug.entrypoints.front.open_engine import make_executor
from tests.e2e.serving import HTTP, Served, gauge
from tests.plugins import accepting, replaying_runtime
from tests.support.combinations import SEED, Combination, plugins, reference
from tests.support.tiny import write_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
WEIGHTS = {"weights": {"use": "agreeing", "seed": SEED}}
VOCAB = 12  #: so few that a random draft is sometimes right


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("v3"), "v3", vocab_size=VOCAB, num_nextn_predict_layers=1
    )


def config(folder: Path | str, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": str(folder),
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 256,
        "memory": {"kv_tokens": 4096},
        "speculative": {"use": "nextn", "adaptive": False, "steps": 3},
    }
    return {**base, **changes}


def engine(folder: Path, **changes: Any) -> LLM:
    return LLM(
        plugins=["tests.plugins.accepting", "tests.plugins.replaying"], **config(folder, **changes)
    )


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(2, VOCAB, 1 + 7 * i % 40).tolist() for i in range(count)]


# ---- counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_counts_of_requests_and_engine_follow_from_the_tokens(folder: Path, overlap: bool) -> None:
    """The first step of a sequence is its prompt's; each later one gains its accepted drafts and
    one token.
    """
    accepting.take()
    with engine(folder, scheduler={"overlap": overlap, "max_running_requests": 5}) as llm:
        found = llm.generate(prompts(12), [GREEDY.replace(max_tokens=9 + i) for i in range(12)])
        llm.control("check")
        stats = llm.stats
    steps = accepting.take()
    for one, gained in zip(found, steps, strict=True):
        assert one.drafts is not None
        assert one.drafts.steps == len(gained) - 1
        assert one.drafts.drafted == 3 * one.drafts.steps
        assert one.drafts.accepted == sum(gained) - 1 - one.drafts.steps
        assert len(one.token_ids) == 1 + one.drafts.steps + one.drafts.accepted
    verified = sum(len(gained) - 1 for gained in steps)
    figures = Acceptance(stats.drafts)
    assert figures.verify_steps == verified and stats.drafted_tokens == 3 * verified
    # drafts accepted behind the end of an answer are the engine's, but not the answer's
    kept = sum(one.drafts.accepted for one in found if one.drafts is not None)
    assert 0 < kept <= stats.accepted_tokens <= kept + 3 * len(found)


def test_a_preempted_sequence_s_second_prefill_is_no_verify_step(folder: Path) -> None:
    accepting.take()
    with engine(folder, context_length=200, memory={"kv_tokens": 208}) as llm:
        found = llm.generate(prompts(8), GREEDY.replace(max_tokens=80))
        assert llm.stats.preemptions > 0
    gained = [len(steps) for steps in accepting.take()]
    resumed = 0
    for one, steps in zip(found, gained, strict=True):
        assert one.drafts is not None and one.drafts.steps < steps
        assert len(one.token_ids) == steps + one.drafts.accepted
        resumed += steps - one.drafts.steps > 1
    assert resumed, "a preempted sequence had decoded before"


def test_an_engine_without_drafts_reports_none(folder: Path) -> None:
    with engine(folder, speculative={"use": "none"}) as llm:
        assert [one.drafts for one in llm.generate(prompts(2), GREEDY)] == [None, None]
        assert llm.stats.drafts == []


def test_groups_report_their_own_drafts(tmp_path: Path) -> None:
    one = Combination(tp=2, dp=2, steps=2)
    given = one.config(reference(tmp_path).folder) | WEIGHTS
    with RankSet(rank_plan(given, plugins()), plugins()) as ranks:
        ranks.run([submit(i, [3 + i, 4, 5], 12) for i in range(6)])
        collected = [ranks.collected[i].counts for i in range(6)]
        groups = [Acceptance(stats.drafts) for stats in ranks.stats.values()]
        whole = Acceptance(total(ranks.stats.values()).drafts)
    assert len(groups) == 2 and all(group.verify_steps for group in groups)
    assert whole.verify_steps == sum(group.verify_steps for group in groups)
    assert whole.verify_steps == sum(len(steps) - 1 for steps in collected)


# ---- the server ----------------------------------------------------------------------------------


@contextmanager
def serving(**changes: Any) -> Iterator[Served]:
    """Serve the embedded model with drafts."""
    loaded = load_plugins()
    given = config("embedded", weights={"use": "auto"}, skip_tokenizer=False, **changes)
    made = make_plan(
        {**given, "metrics": {"compat": ["vllm", "sglang"]}},
        plugins=loaded,
        contributed={"executor.use": "inline"},
    )
    tokenizer = open_tokenizer(made, loaded)
    one = Served(make_executor(made, loaded), (), made, tokenizer, None)
    try:
        one.wait_ready()
        yield one
    finally:
        one.stop()
        one.join()


def labelled(text: str, name: str, prefix: str = "glowplug") -> list[float]:
    """Return the values of a series with a label, in the order of the text."""
    return [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(f"{prefix}:{name}{{")
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as one:
        yield one


def ask(server: Served, route: str, body: dict[str, Any]) -> Any:
    answer = HTTP.post(server.url + route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


CHAT = {"messages": [{"role": "user", "content": "What is 27 + 15?"}], "temperature": 0}


def test_usage_has_accepted_and_rejected_drafts(server: Served) -> None:
    usage = ask(server, "/v1/chat/completions", {**CHAT, "max_tokens": 30, "n": 2})["usage"]
    details = usage["completion_tokens_details"]
    accepted = details["accepted_prediction_tokens"]
    verified, rest = divmod(accepted + details["rejected_prediction_tokens"], 3)
    assert rest == 0 and accepted > 0
    assert usage["completion_tokens"] == 2 + verified + accepted

    body = {**CHAT, "max_tokens": 30, "stream": True, "stream_options": {"include_usage": True}}
    text = HTTP.post(server.url + "/v1/chat/completions", json=body).text
    (streamed,) = re.findall(r'"accepted_prediction_tokens":(\d+)', text)
    assert int(streamed) == accepted // 2


def test_native_answers_have_sglang_s_fields(server: Served) -> None:
    body = {"text": "What is", "sampling_params": {"max_new_tokens": 20, "temperature": 0}}
    meta = ask(server, "/generate", body)["meta_info"]
    verified, accepted = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
    assert meta["completion_tokens"] == 1 + verified + accepted
    assert meta["spec_num_proposed_drafts"] == 3 * verified
    assert meta["spec_accept_length"] == pytest.approx(1 + accepted / verified)
    assert meta["spec_accept_rate"] == pytest.approx(accepted / (3 * verified))


def test_server_info_and_metrics_grow_with_the_same_drafts(server: Served) -> None:
    def figures() -> tuple[Any, str]:
        server.wait_idle()
        info = HTTP.get(server.url + "/server_info").json()
        return info, HTTP.get(server.url + "/metrics").text

    before, _ = figures()
    drawn = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 1.0, "seed": 5, "n": 4}
    usage = ask(server, "/v1/completions", {**drawn, "ignore_eos": True})["usage"]
    info, text = figures()
    found = info["speculation"]
    assert found["algorithm"] == "nextn"
    assert found["draft_shape"] == {"steps": 3, "topk": 1, "draft_tokens": 4}
    verified = found["verify_steps"]["since_start"]
    added = verified - before["speculation"]["verify_steps"]["since_start"]
    details = usage["completion_tokens_details"]
    assert 3 * added == sum(
        details[f"{kind}_prediction_tokens"] for kind in ("accepted", "rejected")
    )
    for span in ("since_start", "last_minute"):
        length, rates = found["accept_length"][span], found["accept_rate_per_position"][span]
        assert 1 < length == pytest.approx(1 + sum(rates)) and len(rates) == 3
        assert rates == sorted(rates, reverse=True) and 0 < rates[2] < rates[0] < 1
        assert found["accept_rate"][span] == pytest.approx((length - 1) / 3)
    (shape,) = found["shapes"]
    assert shape["verify_steps"] == verified and shape["engine_steps"] >= verified / 8
    assert found["simulated_accept_rates"] is None and found["acceptance_falls"] == 0
    assert info["internal_states"] == [
        {"avg_spec_accept_length": found["accept_length"]["since_start"]}
    ]

    for prefix in ("glowplug", "vllm"):
        assert gauge(text, "spec_decode_num_drafts_total", prefix) == verified
        assert gauge(text, "spec_decode_num_draft_tokens_total", prefix) == 3 * verified
        positions = labelled(text, "spec_decode_num_accepted_tokens_per_pos_total", prefix)
        assert sum(positions) == gauge(text, "spec_decode_num_accepted_tokens_total", prefix)
        assert [one / verified for one in positions] == pytest.approx(
            found["accept_rate_per_position"]["since_start"]
        )
    assert labelled(text, "spec_decode_num_drafts_per_pos_total") == [verified] * 3
    assert labelled(text, "spec_decode_steps_total") == [shape["engine_steps"]]
    assert 'shape="3/1/4"' in text and 'position="2"' in text
    assert gauge(text, "spec_accept_length") == pytest.approx(found["accept_length"]["since_start"])
    assert gauge(text, "spec_accept_rate") == pytest.approx(found["accept_rate"]["since_start"])
    assert gauge(text, "spec_verify_calls_total", "sglang") == verified
    assert gauge(text, "spec_acceptance_falls_total") == 0


def test_a_server_without_drafts_has_no_such_figures() -> None:
    with serving(speculative={"use": "none"}) as one:
        usage = ask(one, "/v1/chat/completions", {**CHAT, "max_tokens": 4})["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
        info = HTTP.get(one.url + "/server_info").json()
        assert info["speculation"] is None and info["internal_states"] == []


# ---- simulated acceptance ------------------------------------------------------------------------


def simulated(length: float, steps: int = 3, **more: Any) -> dict[str, Any]:
    rates = list(rates_of_length(length))
    drafts = {"use": "nextn", "adaptive": False, "steps": steps, "simulate_accept_rates": rates}
    return {"speculative": drafts, "benchmark": True, **more}


GRAPHS = {"use": "replaying", "batch_sizes": [1, 2, 4, 8]}


@pytest.mark.parametrize("graphs", [{"use": "eager"}, GRAPHS], ids=["eager", "replayed"])
@pytest.mark.parametrize("length", [1.0, 1.85, 2.6, 4.0])
def test_the_engine_gains_the_simulated_length(
    folder: Path, graphs: dict[str, Any], length: float
) -> None:
    with engine(folder, **simulated(length, graphs=graphs)) as llm:
        found = llm.generate(prompts(16), GREEDY.replace(max_tokens=120))
        llm.control("check")
        figures = Acceptance(llm.stats.drafts)
        assert llm.control("check")["running"] == 0
    assert {len(one.token_ids) for one in found} == {120}
    assert figures.length == pytest.approx(length, abs=0.06)
    whole = int(length) - 1
    assert figures.rates[:whole] == [1.0] * whole
    if graphs is GRAPHS:
        assert replaying_runtime.NEWEST[0].filled, "no step was replayed"


def test_drafts_of_other_algorithms_are_simulated_alike(folder: Path) -> None:
    drafts = {"use": "ngram", "adaptive": False, "steps": 3, "simulate_accept_rates": [1.0, 0.6]}
    with engine(folder, speculative=drafts, benchmark=True) as llm:
        llm.generate(prompts(12), GREEDY.replace(max_tokens=100))
        llm.control("check")
        figures = Acceptance(llm.stats.drafts)
    assert figures.rates == pytest.approx([1.0, 0.6, 0.0], abs=0.06)


TREE = {"use": "nextn", "adaptive": False, "steps": 3, "topk": 2, "draft_tokens": 7}


@pytest.mark.parametrize("graphs", [{"use": "eager"}, GRAPHS], ids=["eager", "replayed"])
def test_trees_gain_the_simulated_length(folder: Path, graphs: dict[str, Any]) -> None:
    """A tree of the most likely drafts may be shallower than its passes, which lowers the gain."""
    rates = list(rates_of_length(2.0))
    drafts = {**TREE, "simulate_accept_rates": rates}
    with engine(folder, speculative=drafts, benchmark=True, graphs=graphs) as llm:
        llm.generate(prompts(12), GREEDY.replace(max_tokens=100))
        llm.control("check")
        (counts,) = llm.stats.drafts
    assert counts.shape == "3/2/7" and len(counts.accepted) == 4
    assert Acceptance([counts]).length == pytest.approx(2.0, abs=0.02)


def test_counts_of_trees_follow_from_the_tokens(folder: Path) -> None:
    accepting.take()
    with engine(folder, speculative=TREE) as llm:
        found = llm.generate(prompts(8), GREEDY)
        llm.control("check")
        figures = Acceptance(llm.stats.drafts)
    verified = sum(len(gained) - 1 for gained in accepting.take())
    assert figures.verify_steps == verified and figures.drafted == 6 * verified
    kept = sum(one.drafts.accepted for one in found if one.drafts is not None)
    assert 0 < kept <= figures.accepted and len(figures.rates) == 3


def test_simulated_acceptance_is_the_same_in_graphs_and_on_the_host(folder: Path) -> None:
    """A request's seed decides, whatever else is in the batch."""
    ways: list[dict[str, Any]] = [
        {"graphs": {"use": "eager"}},
        {"graphs": GRAPHS},
        {"scheduler": {"max_running_requests": 2, "overlap": False}},
    ]
    params = [GREEDY.replace(seed=50 + i, max_tokens=40) for i in range(9)]
    asked = [prompts(3)[2]] * 9
    counts = []
    for way in ways:
        accepting.take()
        with engine(folder, **simulated(2.3, **way)) as llm:
            llm.generate(asked, params)
        counts.append(accepting.take())
    assert counts[0] == counts[1] == counts[2]
    assert len({tuple(one) for one in counts[0]}) == 9, "each seed has numbers of its own"


@pytest.mark.parametrize(
    "layout", [Combination(tp=2, steps=2), Combination(tp=4, ep=2, dp=2, steps=2)]
)
def test_ranks_simulate_alike(tmp_path: Path, layout: Combination) -> None:
    """Ranks that disagreed would write different tokens, and hang or fail."""
    given = layout.config(reference(tmp_path).folder) | WEIGHTS | {"benchmark": True}
    given["speculative"]["simulate_accept_rates"] = [0.9, 0.5]
    with RankSet(rank_plan(given, plugins()), plugins()) as ranks:
        ranks.run([submit(i, [3 + i, 4, 5], 40) for i in range(8)])
        ranks.check_idle()
        found = Acceptance(total(ranks.stats.values()).drafts)
    assert found.rates == pytest.approx([0.9, 0.45], abs=0.12)


def test_rates_per_position_pass_through_the_engine(folder: Path) -> None:
    drafts = {
        "use": "nextn",
        "adaptive": False,
        "steps": 3,
        "simulate_accept_rates": [0.8, 0.5, 0.9],
    }
    with engine(folder, speculative=drafts, benchmark=True) as llm:
        warm = llm.generate(prompts(4), GREEDY) and llm.stats.drafts
        llm.generate(prompts(24), GREEDY.replace(max_tokens=120))
        llm.control("check")
        found = Acceptance(since(llm.stats.drafts, warm))
    assert found.rates == pytest.approx([0.8, 0.4, 0.36], abs=0.05)


def test_only_benchmarks_may_simulate(folder: Path) -> None:
    with pytest.raises(PlanRefused, match="answers of a simulated acceptance are meaningless"):
        engine(folder, **{**simulated(2.0), "benchmark": False})
