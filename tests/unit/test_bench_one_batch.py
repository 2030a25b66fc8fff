"""`bench one-batch`, its memory floor, and the comparison with other engines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.facts.model_facts import DeviceFacts, ModelFacts, stated
from glowplug.core.facts.weight_classes import EXPERTS, TIED, VOCAB
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.entrypoints import bench
from glowplug.entrypoints.bench import peers
from glowplug.entrypoints.bench.one_batch import static_config
from glowplug.entrypoints.bench.others.floor import (
    card_bandwidth,
    distinct_experts,
    known_card,
    prefill_work,
    step_bytes,
)
from glowplug.entrypoints.bench.others.in_process import BatchTimes
from tests.support.reading import declared
from tests.support.tiny import write_config

SHAPES = Path(bench.__file__).resolve().parents[2] / "models" / "shapes"
LONG = 10**6  #: tokens, enough for every expert to be picked


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins(entry_points=False)


def published(plugins: PluginSet, folder: Path, name: str, **changes: object) -> ModelFacts:
    config = json.loads((SHAPES / f"{name}.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return plugins.read_model(str(folder)).facts


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return bench.run(parser.parse_args(list(words)))


# ---- the floor -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v2", "v3", "llama", "v3_fp8"])
def test_with_every_expert_picked_a_step_reads_every_matrix_but_the_embedding(
    name: str, plugins: PluginSet, tmp_path: Path
) -> None:
    facts = plugins.read_model(str(write_config(tmp_path, name))).facts
    matrices = 0.0
    for kind, count in declared(facts).items():
        if kind.draft < 0 and not kind.scale:
            held = (
                count // 2 if kind.role == VOCAB else count
            )  # embedding and head; a tied head is the embedding
            matrices += held * (1 if kind.kept == 1 else 2)
    assert TIED in {kind.role for kind in declared(facts)} or name != "llama"
    found = step_bytes(facts, LONG, 0)
    vectors = (
        2 * facts.hidden_size * (2 * facts.num_layers + 2) + 4096
    )  # norms and biases, which the floor leaves out
    assert matrices - vectors <= found.total <= matrices * 1.0003 + 1


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 1.17), (8, 4.25), (32, 7.18), (128, 8.18)])
def test_floor_of_v2_lite_is_the_published_one(
    batch: int, milliseconds: float, plugins: PluginSet, tmp_path: Path
) -> None:
    facts = published(plugins, tmp_path, "deepseek-v2-lite", vocab_size=129280)
    assert step_bytes(facts, batch, 1024).seconds(4.3e12) * 1e3 == pytest.approx(
        milliseconds, abs=0.006
    )


@pytest.mark.parametrize(
    ("batch", "milliseconds"), [(1, 1.11), (8, 3.14), (32, 7.50), (128, 11.18)]
)
def test_floor_of_the_v3_slice_is_the_published_one(
    batch: int, milliseconds: float, plugins: PluginSet, tmp_path: Path
) -> None:
    facts = published(plugins, tmp_path, "deepseek-v3-slice")
    assert step_bytes(facts, batch, 512).seconds(4.3e12) * 1e3 == pytest.approx(
        milliseconds, abs=0.006
    )


def test_prefill_multiplies_every_weight_that_a_token_passes(
    plugins: PluginSet, tmp_path: Path
) -> None:
    facts = plugins.read_model(str(write_config(tmp_path, "v2"))).facts
    one_token = step_bytes(facts, 1, 0)
    head = 2 * facts.vocab_size * facts.hidden_size
    work = prefill_work(facts, 1, 1)
    channels = (
        stated(facts, "qk_nope_head_dim") + facts.qk_rope_head_dim + stated(facts, "v_head_dim")
    )
    scores = 2 * facts.num_layers * facts.num_heads * channels
    assert work.linear + work.wide == pytest.approx(
        one_token.total + scores
    )  # 2 bytes and 2 operations a weight
    two, three = prefill_work(facts, 2, 64), prefill_work(facts, 3, 64)
    assert two.linear * 3 == pytest.approx(three.linear * 2)
    longer = prefill_work(facts, 2, 128)
    assert longer.linear == pytest.approx(2 * two.linear)
    scored = two.wide - prefill_work(facts, 128, 1).wide + 126 * head
    assert scored == pytest.approx(scores * (2 * 64 * 65 / 2 - 128))


def test_prefill_floor_is_reading_or_multiplying_whichever_takes_longer(
    plugins: PluginSet, tmp_path: Path
) -> None:
    card = known_card("NVIDIA H200")
    assert card is not None and known_card("NVIDIA T4") is None
    facts = published(plugins, tmp_path, "deepseek-v2-lite", vocab_size=129280)
    assert card.prefill(facts, 1, 64) == step_bytes(facts, 64, 0).seconds(4.3e12)
    assert card.prefill(facts, 32, 1024) == prefill_work(facts, 32, 1024).seconds((7.9e14, 1.58e15))
    assert 150_000 < 32 * 1024 / card.prefill(facts, 32, 1024) < 180_000
    fp8 = published(plugins, tmp_path, "deepseek-v3-slice")
    work = prefill_work(fp8, 32, 512)
    assert work.fp8 and work.seconds((1.0, 2.0)) == pytest.approx(work.linear / 2 + work.wide)


def test_cache_bytes_grow_with_batch_context_and_dtype(plugins: PluginSet, tmp_path: Path) -> None:
    facts = plugins.read_model(str(write_config(tmp_path, "v3"))).facts
    one = step_bytes(facts, 1, 10).kv
    assert one == 10 * 3 * (32 + 8) * 2
    assert step_bytes(facts, 4, 30, kv_element=1).kv == 6 * one
    assert distinct_experts(facts, 1) == pytest.approx(3)


def test_bandwidth_is_the_slowest_cards() -> None:
    known, other = (
        DeviceFacts("NVIDIA H200", 1, 90, 4.8e12),
        DeviceFacts("NVIDIA A100", 1, 80, 2e12),
    )
    assert card_bandwidth([known]) == 4.3e12
    assert card_bandwidth([known, other]) == pytest.approx(1.8e12)
    assert card_bandwidth([]) == 0


# ---- one batch -----------------------------------------------------------------------------------


def test_steps_settle_before_they_count() -> None:
    times = BatchTimes(2, 8, 21, 1.0, (9.0,) * 4 + (1.0, 2.0, 3.0) * 4 + (2.0,) * 4, 99.0)
    assert (times.median_decode, times.mean_decode) == (2.0, 2.0)
    assert BatchTimes(2, 8, 3, 1.0, (9.0, 1.0), 99.0).mean_decode == 5.0
    assert BatchTimes(2, 8, 1, 1.0, (), 1.0).decode_throughput == 0.0


def test_options_of_the_operator_are_kept() -> None:
    config = static_config(
        {"scheduler": {"chunk_size": 7}, "context_length": 99}, [(4, 8192, 5), (1, 10, 20)], 9000
    )
    assert config["scheduler"] == {"max_running_requests": 4, "chunk_size": 7, "mixed": False}
    assert config["context_length"] == 99
    assert static_config({}, [(8, 8192, 5)], 9000)["scheduler"]["chunk_size"] == 32768
    lengths = [
        static_config({}, [(2, length, 5)], 9000)["context_length"] for length in (8, 8192, 10000)
    ]
    assert lengths == [4096, 8197, 9000]
    assert (
        "mixed" not in static_config({"scheduler": {"use": "another"}}, [(1, 1, 1)], 9)["scheduler"]
    )


def test_random_weights_without_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, saved, lines = (
        write_config(tmp_path / "m", "v3"),
        tmp_path / "one.json",
        tmp_path / "one.jsonl",
    )
    status = run(
        "one-batch",
        "--model",
        str(folder),
        "--load-format",
        "dummy",
        "--batch-size",
        "1",
        "3",
        "--input-len",
        "20",
        "--output-len",
        "6",
        "--repeat",
        "1",
        "--bandwidth",
        "0.01",
        "--device",
        "cpu",
        "--chunked-prefill-size",
        "32",
        "--save",
        str(saved),
        "--result-filename",
        str(lines),
    )
    assert status == 0
    whole = json.loads(saved.read_text())
    assert [found["batch_size"] for found in whole["results"]] == [1, 3]
    for found in whole["results"]:
        assert 0 < found["floor_share"] and found["decode_median_ms"] > 0
        assert found["prefill_ms"] == pytest.approx(found["prefill_latency"] * 1e3)
    assert [found["decode_steps"] for found in whole["results"]] == [
        5,
        5,
    ]  # prompts that take several steps come first
    assert {"command", "date", "packages", "card", "glowplug"} <= set(whole)
    assert whole["chosen"]["weights"]["use"] == "random"
    assert len(lines.read_text().splitlines()) == 2
    assert "floor_share" in capsys.readouterr().out


def test_a_sequence_that_ends_early_fails_its_batch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logits that are not finite end a sequence with an error. A measurement without its decode
    steps is not a result.
    """
    from glowplug.plugins.sampling.torch_sampler_runtime import TorchSampler

    sample = TorchSampler.sample

    def spoiled(self: TorchSampler, logits: Any, *more: Any) -> Any:
        return sample(self, logits.fill_(float("nan")) if logits.shape[0] == 2 else logits, *more)

    folder, saved = write_config(tmp_path / "m", "llama"), tmp_path / "x.json"
    monkeypatch.setattr(TorchSampler, "sample", spoiled)
    assert (
        run(
            "one-batch",
            "--model",
            str(folder),
            "--load-format",
            "dummy",
            "--device",
            "cpu",
            "--batch-size",
            "1",
            "2",
            "--input-len",
            "9",
            "--output-len",
            "4",
            "--repeat",
            "1",
            "--max-running-requests",
            "3",
            "--save",
            str(saved),
        )
        == 1
    )
    good, bad = json.loads(saved.read_text())["results"]
    assert good["decode_steps"] == 3
    assert "batch of 2 x 9 ended with 'error'" in bad["error"]
    assert bad["error"] in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("one-batch", "--batch-size", "2", "--input-len", "9"),
        ("offline", "--num-prompts", "3", "--input-len", "9"),
    ],
)
def test_a_profile_is_a_chrome_trace_of_a_further_run(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GLOWPLUG_PROFILE_DIR", str(tmp_path / "traces"))
    folder = write_config(tmp_path / "m", "llama")
    assert (
        run(
            *words,
            "--model",
            str(folder),
            "--load-format",
            "dummy",
            "--device",
            "cpu",
            "--output-len",
            "3",
            "--repeat",
            "1",
            "--profile",
        )
        == 0
    )
    (trace,) = (tmp_path / "traces").iterdir()
    assert f"trace: {trace}" in capsys.readouterr().out
    assert len(json.loads(trace.read_text())["traceEvents"]) > 50


# ---- beside other engines ------------------------------------------------------------------------

STATIC_LINE = {
    "batch_size": 8,
    "input_len": 1024,
    "prefill_throughput": 67000.0,
    "median_decode_latency": 0.00726,
}


def test_our_points_beside_two_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, sglang, vllm = tmp_path / "ours.json", tmp_path / "sglang.jsonl", tmp_path / "vllm.log"
    ours.write_text(
        json.dumps(
            {
                "card": "H200",
                "results": [
                    {
                        "batch_size": 8,
                        "decode_median_ms": 5.0,
                        "prefill_tokens_per_s": 90000.0,
                        "floor_ms": 4.0,
                        "floor_prefill_tokens_per_s": 120000.0,
                    },
                    {
                        "batch_size": 1,
                        "decode_median_ms": 4.0,
                        "prefill_tokens_per_s": 30000.0,
                        "floor_ms": 1.0,
                    },
                ],
            }
        )
    )
    sglang.write_text(
        "\n".join(
            json.dumps(STATIC_LINE | {"median_decode_latency": step}) for step in (0.00726, 0.0071)
        )
    )
    vllm.write_text(
        "INFO loading\nbatch 1: prefill 39.2 ms (26122 tokens/s), decode step 3.49 ms (286 "
        "tokens/s)\n"
        "batch 8: prefill 96.0 ms (85370 tokens/s), decode step 6.77 ms (1181 tokens/s)\n"
    )
    out, table = tmp_path / "out.json", tmp_path / "out.md"
    assert (
        run(
            "peers",
            str(ours),
            "--peer",
            f"sglang={sglang}",
            "--peer",
            f"vllm={vllm}",
            "--output-file",
            str(out),
            "--markdown",
            str(table),
        )
        == 0
    )
    whole = json.loads(out.read_text())
    first, second = whole["tables"]["decode step, ms"]
    assert (first["point"], second["point"]) == (1, 8)
    assert first["times_best_peer"] == pytest.approx(3.49 / 4.0)
    assert "sglang" not in first
    assert second["sglang"] == pytest.approx(7.1)
    assert second["times_best_peer"] == pytest.approx(6.77 / 5.0)
    assert second["share_of_floor"] == pytest.approx(0.8)
    prefill = whole["tables"]["prefill, tokens/s"]
    assert prefill[1]["times_best_peer"] == pytest.approx(90000 / 85370)
    assert (prefill[1]["floor"], prefill[1]["share_of_floor"]) == (120000.0, 0.75)
    assert "floor" not in prefill[0]
    assert whole["conditions"]["card"] == "H200"
    assert table.read_text().strip() == capsys.readouterr().out.strip()


def test_serving_records_compare_too(tmp_path: Path) -> None:
    def line(level: int, rate: float, ttft: float, tpot: float) -> str:
        return json.dumps(
            {
                "max_concurrency": level,
                "output_throughput": rate,
                "mean_ttft_ms": ttft,
                "mean_tpot_ms": tpot,
                "date": "today",
                "seed": 0,
                "completed": 3 * level,
            }
        )

    ours, peer, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "out.json"
    ours.write_text(line(1, 300.0, 30.0, 3.0) + "\n" + line(32, 3000.0, 400.0, 9.0))
    peer.write_text(line(1, 271.0, 39.2, 3.54) + "\n" + line(32, 2577.0, 441.0, 10.71))
    assert run("peers", str(ours), "--peer", f"sglang={peer}", "--output-file", str(out)) == 0
    tables = json.loads(out.read_text())["tables"]
    assert tables["serving, output tokens/s"][0]["times_best_peer"] == pytest.approx(300 / 271)
    assert tables["serving, mean TTFT in ms"][1]["times_best_peer"] == pytest.approx(441 / 400)
    assert tables["serving, mean TPOT in ms"][1]["times_best_peer"] == pytest.approx(10.71 / 9)
    assert json.loads(out.read_text())["conditions"] == {
        "date": "today",
        "seed": 0,
        "requests": {"1": 3, "32": 96},
    }


def test_each_serving_point_beside_its_floor(
    tmp_path: Path, plugins: PluginSet, capsys: pytest.CaptureFixture[str]
) -> None:
    published(plugins, tmp_path, "deepseek-v2-lite", vocab_size=129280)
    ours, out = tmp_path / "a.jsonl", tmp_path / "out.json"
    ours.write_text(
        json.dumps(
            {
                "max_concurrency": 32,
                "output_throughput": 3431.0,
                "mean_ttft_ms": 214.0,
                "mean_tpot_ms": 8.5,
                "random_input_len": 1024,
                "random_output_len": 256,
            }
        )
    )
    words = ("peers", str(ours), "--output-file", str(out), "--floor-model", str(tmp_path))
    assert run(*words) == 0
    rows = {title: table[0] for title, table in json.loads(out.read_text())["tables"].items()}
    step = rows["serving, mean TPOT in ms"]
    facts = plugins.read_model(str(tmp_path)).facts
    assert step["floor"] == pytest.approx(step_bytes(facts, 32, 1024 + 128).seconds(4.3e12) * 1e3)
    assert step["share_of_floor"] == pytest.approx(step["floor"] / 8.5)
    first = rows["serving, mean TTFT in ms"]
    assert first["floor"] == pytest.approx(191.9 * 33 / 64, rel=0.01)
    assert first["share_of_floor"] == first["floor"] / 214.0
    rate = rows["serving, output tokens/s"]
    assert rate["share_of_floor"] == 3431.0 / rate["floor"]
    assert rate["floor"] == pytest.approx(32 * 256 / (0.1919 + 255 * step["floor"] / 1e3), rel=0.01)
    assert run(*words, "--floor-card", "T4") == 2
    assert "not been measured" in capsys.readouterr().err


def test_serving_beside_the_offline_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, offline, out = tmp_path / "a.jsonl", tmp_path / "off.jsonl", tmp_path / "out.json"
    ours.write_text(
        json.dumps(
            {
                "max_concurrency": 256,
                "output_throughput": 11700.0,
                "mean_ttft_ms": 500.0,
                "mean_tpot_ms": 20.0,
            }
        )
    )
    offline.write_text(json.dumps({"output_throughput": 12000.0, "duration": 11.0}))
    assert run("peers", str(ours), "--offline", str(offline), "--output-file", str(out)) == 0
    table = json.loads(out.read_text())["tables"][
        "serving beside the offline engine, output tokens/s"
    ]
    assert table == [
        {"point": 256, "glowplug": 11700.0, "offline": 12000.0, "share_of_offline": 0.975}
    ]
    assert "0.975" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("peer", "said"), [("nothing", "NAME=FILE"), ("x=/nonexistent", "No such file")]
)
def test_a_peer_that_cannot_be_read_is_named(
    peer: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = tmp_path / "ours.json"
    ours.write_text(json.dumps({"results": [STATIC_LINE]}))
    assert run("peers", str(ours), "--peer", peer) == 2
    assert said in capsys.readouterr().err


def test_an_empty_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, log = tmp_path / "ours.json", tmp_path / "peer.log"
    ours.write_text(json.dumps({"results": [STATIC_LINE]}))
    log.write_text("CUDA out of memory\n")
    assert run("peers", str(ours), "--peer", f"vllm={log}") == 2
    assert "has no result" in capsys.readouterr().err


def test_roles_of_the_floor_cover_the_experts(plugins: PluginSet, tmp_path: Path) -> None:
    facts = plugins.read_model(str(write_config(tmp_path, "v3"))).facts
    experts = sum(count for kind, count in declared(facts).items() if kind.role == EXPERTS)
    assert step_bytes(facts, LONG, 0).experts == pytest.approx(2 * experts)


def test_no_ratio_to_a_time_of_zero() -> None:
    """Tokens that arrive together have no time between them."""
    times = peers.Metric("mean_tpot_ms", "serving, mean TPOT in ms", lower=True)
    rates = peers.Metric("output_throughput", "serving, output tokens/s", lower=False)
    for metric, ours, theirs, ratio in (
        (times, 0.0, 8.0, {}),
        (times, 4.0, 8.0, {"times_best_peer": 2.0}),
        (rates, 8.0, 0.0, {}),
        (rates, 8.0, 4.0, {"times_best_peer": 2.0}),
    ):
        row = peers._row(
            metric, 1, {"glowplug": {1: {metric.key: ours}}, "x": {1: {metric.key: theirs}}}
        )
        assert {name: row[name] for name in row if name == "times_best_peer"} == ratio
