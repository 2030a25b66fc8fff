"""/metrics: Prometheus text with vLLM's stems, other names on request, figures that add up, bounded
labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from glowplug.entrypoints.server.compat_names import ABSENT, COMPAT
from tests.e2e.serving import HTTP, Served, gauge, served

VALUE = r'"(?:[^"\\\n]|\\.)*"'
LINE = re.compile(
    r"^[a-zA-Z_:][a-zA-Z0-9_:]*\{model_name=" + VALUE + r"(,[a-z_]+=" + VALUE + r")*\} [0-9.e+-]+$"
)
CHAT = "/v1/chat/completions"


@pytest.fixture
def server() -> Iterator[Served]:
    with served(
        metrics={"compat": ["vllm", "sglang"]}, server={"served_model_name": 'odd"name\n'}
    ) as one:
        yield one


def scrape(server: Served) -> str:
    answer = HTTP.get(server.url + "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return answer.text


def test_every_line_parses_and_every_series_has_a_type(server: Served) -> None:
    typed = set()
    for line in scrape(server).splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert kind in ("counter", "gauge", "histogram") and name not in typed
            typed.add(name)
        elif not line.startswith("#"):
            assert LINE.match(line), line
            assert re.sub(r"(_bucket|_sum|_count)?\{.*", "", line) in typed


def test_counts_add_up(server: Served) -> None:
    for i in range(3):
        messages = [{"role": "user", "content": "say:abc"}]
        HTTP.post(
            server.url + CHAT,
            json={"messages": messages, "n": 2, "max_tokens": 9, "stream": bool(i % 2)},
        )
    text = scrape(server)
    assert gauge(text, "num_requests_total") == 3
    assert gauge(text, "generation_tokens_total") == 3 * 2 * 4
    assert gauge(text, "prompt_tokens_total") == 3 * 2 * (len("say:abc") + 3)
    assert (
        gauge(text, "e2e_request_latency_seconds_count")
        == gauge(text, "time_to_first_token_seconds_count")
        == 6
    )
    assert gauge(text, "inter_token_latency_seconds_count") == 6 * 3
    assert gauge(text, "request_generation_tokens_sum") == 24
    assert (
        gauge(text, "request_params_max_tokens_sum") == 6 * 9
        and gauge(text, "request_params_n_sum") == 6
    )
    assert 'request_success_total{model_name="odd\\"name\\n",finished_reason="stop"} 6' in text


def test_refusals_are_counted_by_status(server: Served) -> None:
    for body in (
        {},
        {"messages": "x"},
        {"messages": [{"role": "user", "content": "x"}], "model": "other"},
    ):
        HTTP.post(server.url + CHAT, json=body)
    text = scrape(server)
    for status, count in (("400", 2), ("404", 1)):
        assert (
            f'requests_rejected_total{{model_name="odd\\"name\\n",status="{status}"}} {count}'
            in text
        )


def test_histogram_buckets_are_cumulative(server: Served) -> None:
    HTTP.post(server.url + CHAT, json={"messages": [{"role": "user", "content": "say:abc"}]})
    counts = [
        float(line.rpartition(" ")[2])
        for line in scrape(server).splitlines()
        if line.startswith("glowplug:request_generation_tokens_bucket")
    ]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 1
    assert counts[2] == 1  # four tokens: in the bucket of at most five


def test_other_names_have_the_same_values(server: Served) -> None:
    HTTP.post(server.url + CHAT, json={"messages": [{"role": "user", "content": "say:abc"}]})
    text = scrape(server)
    for prefix, theirs, ours in (
        ("vllm", "generation_tokens_total", "generation_tokens_total"),
        ("vllm", "time_to_first_token_seconds_count", "time_to_first_token_seconds_count"),
        ("vllm", "kv_cache_usage_perc", "kv_cache_usage_perc"),
        ("sglang", "num_running_reqs", "num_requests_running"),
        ("sglang", "token_usage", "kv_cache_usage_perc"),
        ("sglang", "max_total_num_tokens", "max_total_num_tokens"),
    ):
        assert gauge(text, theirs, prefix) == gauge(text, ours)
    for prefix in ("vllm", "sglang"):
        assert sum(line.startswith(f"# TYPE {prefix}:") for line in text.splitlines()) >= 15


def test_other_names_have_the_labels_of_their_engine(server: Served) -> None:
    lines = scrape(server).splitlines()
    (running,) = (line for line in lines if line.startswith("vllm:num_requests_running{"))
    assert running == 'vllm:num_requests_running{model_name="odd\\"name\\n",engine="0"} 0'
    (queued,) = (line for line in lines if line.startswith("sglang:num_queue_reqs{"))
    assert 'engine_type="unified",tp_rank="0",pp_rank="0"' in queued
    (asked,) = (line for line in lines if line.startswith("sglang:num_requests_total{"))
    assert 'model_name="odd\\"name\\n"}' in asked


def test_sequences_count_as_sglang_s_requests(server: Served) -> None:
    body = {"messages": [{"role": "user", "content": "say:abc"}], "n": 2}
    HTTP.post(server.url + CHAT, json=body)
    text = scrape(server)
    assert gauge(text, "num_requests_total") == 1
    assert gauge(text, "num_requests_total", "sglang") == gauge(text, "num_sequences_total") == 2


def test_names_of_another_meaning_are_not_exported(server: Served) -> None:
    text = scrape(server)
    for prefix, names in ABSENT.items():
        exported = {series.name for series in COMPAT[prefix]}
        assert not exported & names.keys()
        assert [name for name in names if f"{prefix}:{name}" in text] == []


@pytest.mark.parametrize(
    ("compat", "prefixes"),
    [
        ("none", set()),
        ("vllm", {"vllm"}),
        ("sglang", {"sglang"}),
        ("all", {"vllm", "sglang"}),
        (["sglang"], {"sglang"}),
    ],
)
def test_other_names_are_exported_on_request(compat: str | list[str], prefixes: set[str]) -> None:
    with served(metrics={"compat": compat}) as one:
        text = scrape(one)
    found = {name for name in ("vllm", "sglang") if f"# TYPE {name}:" in text}
    assert found == prefixes


def test_vllm_s_counters_and_phase_histograms_have_its_names_and_units(server: Served) -> None:
    """Prefix counters are in tokens; look-ups have a name of their own. The names are those of
    vLLM's V1 engine.
    """
    prompt = "say:" + "a" * 60
    server.executor.stats.preemptions = 3
    for salt in ("cold", "warm"):
        httpx.post(
            server.url + "/v1/completions",
            json={"prompt": prompt, "cache_salt": salt, "max_tokens": 9},
        )
    server.wait_idle()
    text = scrape(server)
    length = gauge(text, "prompt_tokens_total") / 2
    for prefix in ("vllm", "glowplug"):
        assert gauge(text, "prefix_cache_queries_total", prefix) == 2 * length
        assert gauge(text, "prefix_cache_hits_total", prefix) == length // 16 * 16 > 0
        assert gauge(text, "num_preemptions_total", prefix) == 3
        phases = [
            f"request_{phase}_time_seconds" for phase in ("queue", "prefill", "decode", "inference")
        ]
        assert [gauge(text, f"{name}_count", prefix) for name in phases] == [2, 2, 2, 2]
        queue, prefill, decode, inference = (gauge(text, f"{name}_sum", prefix) for name in phases)
        assert inference == pytest.approx(prefill + decode) and queue + inference > 0
    assert (
        gauge(text, "prefix_cache_lookups_total") == 2
        and gauge(text, "prefix_cache_lookup_hits_total") == 1
    )
    assert gauge(text, "cache_hit_rate") == pytest.approx(length // 16 * 16 / (2 * length))
    assert not re.search(
        r"^(vllm|glowplug):(num_preemptions|prefix_cache_(queries|hits))\{", text, re.MULTILINE
    )


def test_every_counter_is_named_total(server: Served) -> None:
    counters = re.findall(r"^# TYPE (\S+) counter$", scrape(server), re.MULTILINE)
    assert [name for name in counters if not name.endswith("_total")] == []


def test_rates_are_those_of_busy_time(server: Served) -> None:
    for name, value in (("output_tokens", 500), ("prompt_tokens", 80), ("busy_seconds", 2.5)):
        setattr(server.executor.stats, name, value)
    httpx.post(
        server.url + CHAT,
        json={"messages": [{"role": "user", "content": "say:abc"}], "max_tokens": 1},
    )
    server.wait_idle()
    text = scrape(server)
    assert gauge(text, "engine_busy_seconds_total") == 2.5
    assert gauge(text, "generation_tokens_per_second") == pytest.approx(501 / 2.5)
    assert gauge(text, "prompt_tokens_per_second") == pytest.approx(80 / 2.5)


def test_labels_do_not_grow_with_what_clients_send(server: Served) -> None:
    with httpx.Client(base_url=server.url) as client:
        for i in range(20):
            client.get(f"/nowhere/{i}")
            client.get(f"/v1/models/model-{i}")
            client.request("PROPFIND", f"/health?{i}")
    handlers = set(re.findall(r'http_requests_total\{[^}]*handler="([^"]*)"', scrape(server)))
    assert handlers <= {"unmatched", "/v1/models/{model:path}", "/ready", "/metrics", "/health"}


def test_metrics_can_be_off() -> None:
    with served(metrics={"enabled": False}) as one:
        assert HTTP.get(one.url + "/metrics").status_code == 404
    with served() as one:
        assert "vllm:" not in scrape(one)
