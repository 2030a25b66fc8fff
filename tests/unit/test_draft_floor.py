"""Floors of steps with drafts: bytes, the speed that they allow, and the documented comparison."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import pytest

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.entrypoints import bench
from glowplug.entrypoints.bench.others.floor import StepBytes, step_bytes
from glowplug.entrypoints.bench.others.step_floor import (
    DraftReads,
    allowed_speedup,
    draft_step_bytes,
    eagle_reads,
    nextn_reads,
)
from tests.support.source_tree import ROOT
from tests.support.tiny import write_config

BENCHMARKS = ROOT / "docs" / "benchmarks"
MEAN_CONTEXT = 64 + 128 // 2  #: of the trace's requests: the prompt and half of the output


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins(entry_points=False)


@pytest.fixture(scope="module")
def v3_slice(plugins: PluginSet, tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    folder = tmp_path_factory.mktemp("slice")
    config = (ROOT / "models" / "shapes" / "deepseek-v3-slice.json").read_text()
    (folder / "config.json").write_text(config)
    return plugins.read_model(str(folder)).facts


def llama(plugins: PluginSet, folder: Path) -> ModelFacts:
    return plugins.read_model(str(write_config(folder, "llama"))).facts


def test_bytes_of_a_tree_on_the_v3_slice(v3_slice: ModelFacts) -> None:
    """Computed by hand for 4 rows of 100 tokens with drafts 2/3/6."""
    fp8 = 1 + 4 / (128 * 128)
    hidden, latent = 7168, 512 + 64
    head = 2 * 129280 * hidden
    attention = fp8 * (
        hidden * 1536  # queries down and up
        + 1536 * 128 * 192
        + hidden * latent
        + 512 * 128 * (128 + 128)
        + 128 * 128 * hidden
    )
    expert = fp8 * 3 * hidden * 2048
    gate = 2 * 256 * hidden
    dense = fp8 * 3 * hidden * 18432

    def distinct(tokens: int) -> float:
        return 256 * (1 - (248 / 256) ** tokens)

    target = 5 * attention + dense + 4 * (expert + gate) + head
    draft_pass = attention + expert + gate + head + 2 * 2 * hidden * hidden
    wanted = StepBytes(
        target + 2 * draft_pass,
        expert * (4 * distinct(4 * 6) + distinct(4 * 1) + distinct(4 * 3)),
        2 * 4 * 100 * latent * (5 + 2),
    )
    shape = DraftShape(2, 3, 6)
    found = draft_step_bytes(v3_slice, shape, 4, 100, nextn_reads(v3_slice))
    for part in ("fixed", "experts", "kv"):
        assert getattr(found, part) == pytest.approx(getattr(wanted, part)), part
    reduced = draft_step_bytes(v3_slice, shape, 4, 100, nextn_reads(v3_slice, 32768))
    assert found.total - reduced.total == pytest.approx(2 * 2 * (129280 - 32768) * hidden)
    plain = step_bytes(v3_slice, 4, 100).total
    allowed = allowed_speedup(v3_slice, shape, 2.1, 4, 100, nextn_reads(v3_slice))
    assert allowed == pytest.approx(2.1 * plain / wanted.total)


def test_drafts_without_a_model_read_what_one_step_reads(
    plugins: PluginSet, tmp_path: Path
) -> None:
    """N-gram drafts of a dense model: all tokens of a row share weights and cache."""
    model = llama(plugins, tmp_path)
    found = draft_step_bytes(model, DraftShape(4, 2, 6), 3, 50, None)
    assert found == step_bytes(model, 3, 50)


def test_a_whole_draft_model_has_one_pass_more(plugins: PluginSet, tmp_path: Path) -> None:
    model = llama(plugins, tmp_path)
    reads = DraftReads(model, stores_last=True)
    for shape, passes in ((DraftShape(), 1), (DraftShape.chain(3), 4), (DraftShape(3, 2, 6), 4)):
        found = draft_step_bytes(model, shape, 3, 50, reads)
        assert found.total == pytest.approx((1 + passes) * step_bytes(model, 3, 50).total)


def test_a_pass_of_an_eagle_head(plugins: PluginSet, tmp_path: Path) -> None:
    """EAGLE-1 joins token and state by ``fc``; attention of EAGLE-3 reads both."""
    config = dict(json.loads((write_config(tmp_path, "llama") / "config.json").read_text()))
    layer = {**config, "num_hidden_layers": 1}
    found = {}
    for name, more in (
        ("LlamaForCausalLMEagle", {}),
        ("LlamaForCausalLMEagle3", {"draft_vocab_size": 32}),
    ):
        changed = layer | more | {"architectures": [name]}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        found[name] = eagle_reads(plugins.read_model(str(tmp_path)).facts, {})
    first, third = found.values()
    hidden, heads, keys = (
        config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    size = config.get("head_dim", hidden // heads)
    assert first.joined == 2 * hidden * hidden
    assert third.joined == hidden * size * (heads + 2 * keys)
    assert (first.model.vocab_size, third.model.vocab_size) == (config["vocab_size"], 32)


def test_the_documented_speeds_are_those_that_the_bytes_allow(v3_slice: ModelFacts) -> None:
    """Every row of the page's table follows from the function and from the record."""
    record = json.loads((BENCHMARKS / "drafts-v3slice-h200.json").read_text())
    speeds: dict[tuple[float, int, str], list[float]] = defaultdict(list)
    for point in record["trace"]:
        for name in ("1/1/2", "3/1/4", "no speculation"):
            key = point["accept_length"], point["load"], name
            speeds[key].append(point[name]["tokens_per_s"])
    page = (BENCHMARKS / "speculation.md").read_text(encoding="utf-8")
    reads = nextn_reads(v3_slice)
    for steps, length in ((1, 1.85), (3, 2.6)):
        shape = DraftShape.chain(steps)
        for rows in (1, 8, 32, 128, 256):
            plain = step_bytes(v3_slice, rows, MEAN_CONTEXT).total / 1e9
            moved = draft_step_bytes(v3_slice, shape, rows, MEAN_CONTEXT, reads).total / 1e9
            allowed = allowed_speedup(v3_slice, shape, length, rows, MEAN_CONTEXT, reads)
            measured = sum(speeds[length, rows, str(shape)]) / sum(
                speeds[length, rows, "no speculation"]
            )
            row = f"| {steps}, {length} | {rows} | {plain:.1f}, {moved:.1f} | {allowed:.2f} |"
            row += f" {measured:.2f} | {100 * measured / allowed:.0f}% |"
            assert row in page


def compared(folder: Path, model: str) -> dict[str, list[dict[str, float]]]:
    """Return the tables of `bench peers` for one serving run with drafts of two shapes."""
    line = {
        "max_concurrency": 8,
        "output_throughput": 1620.0,
        "mean_ttft_ms": 75.0,
        "mean_tpot_ms": 4.5,
        "random_input_len": 512,
        "random_output_len": 256,
        "accept_length": 1.8,
        "draft_shapes": {"1/1/2": 300, "3/1/4": 100},
    }
    ours, out = folder / "a.jsonl", folder / "out.json"
    ours.write_text(json.dumps(line))
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    words = ["peers", str(ours), "--output-file", str(out), "--floor-model", model]
    assert bench.run(parser.parse_args(words)) == 0
    return dict(json.loads(out.read_text())["tables"])


def test_served_drafts_beside_their_floor(v3_slice: ModelFacts, tmp_path: Path) -> None:
    """Steps with drafts take longer, and gain more tokens."""
    tables = compared(tmp_path, v3_slice.path)
    (row,) = tables["serving, mean TPOT in ms"]
    one, three = (
        draft_step_bytes(v3_slice, DraftShape.chain(n), 8, 512 + 128, nextn_reads(v3_slice)).total
        for n in (1, 3)
    )
    assert row["floor"] == pytest.approx((0.75 * one + 0.25 * three) / 4.3e12 / 1.8 * 1e3)
    assert row["share_of_floor"] == pytest.approx(row["floor"] / 4.5)
    (rate,) = tables["serving, output tokens/s"]
    assert 0 < rate["share_of_floor"] < 1


def test_served_drafts_of_a_model_without_a_next_token_layer(
    plugins: PluginSet, tmp_path: Path
) -> None:
    """Only prompts have a floor, as the bytes of its draft are not known."""
    llama(plugins, tmp_path)
    tables = compared(tmp_path, str(tmp_path))
    with_floor = {title for title, (row,) in tables.items() if "floor" in row}
    assert with_floor == {"serving, mean TTFT in ms"}
