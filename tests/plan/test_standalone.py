"""Whole models as drafts in the plan: their components and sizes, names in other engines' commands,
and refusals of all that does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.testing.harness.fakes import TINY_LLAMA, TINY_V3, write_model
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.cli.flags.command_line import CommandLine, read_command_line
from glowplug.entrypoints.cli.flags.parser import Parser
from tests.plan.test_eagle import V3_HEAD, write_head

FIELD = "speculative.draft_model"
USE = "speculative.use"
VOCAB = 256
TARGET = {**TINY_V3, "vocab_size": VOCAB, "num_hidden_layers": 4, "max_position_embeddings": 2048}
DRAFT = {**TINY_LLAMA, "vocab_size": VOCAB, "num_hidden_layers": 2}
LAYER = {**TARGET, "architectures": ["DeepseekV3ForCausalLMNextN"], "num_hidden_layers": 1}
DUMMY = {"weights": {"use": "random"}}


def given(plugins: PluginSet, *words: str) -> CommandLine:
    parser = Parser(prog="glowplug serve")
    add_engine_options(parser)
    return read_command_line(parser.parse_args(list(words)), plugins)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_model(tmp_path / "target", TARGET)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        return write_model(tmp_path / "draft", {**DRAFT, **changes})

    return write


def configured(target: Path, draft: Path | None, **options: Any) -> dict[str, Any]:
    folder = {} if draft is None else {"draft_model": str(draft)}
    return {
        **DUMMY,
        "model": str(target),
        "speculative": {"use": "standalone", **folder, **options},
    }


@pytest.fixture
def refusals(planned: Any) -> Callable[..., list[Refusal]]:
    def run(config: dict[str, Any], **sheet: Any) -> list[Refusal]:
        with pytest.raises(PlanRefused) as caught:
            planned(config, **sheet)
        assert all(r.by and r.field and r.reason and r.fix for r in caught.value.refusals)
        return list(caught.value.refusals)

    return run


# ---- components and sizes ------------------------------------------------------------------------


def test_a_draft_of_another_family_has_components_and_memory_of_its_own(
    planned: Any, target: Path, make: Any
) -> None:
    plain = planned({**DUMMY, "model": str(target)})
    plan = planned(configured(target, make(), steps=2))
    assert (plan.sizes.draft_layers, plan.sizes.width) == (0, 3)
    chosen = {choice.slot: choice.name for choice in plan.draft_choices}
    assert chosen == {"model": "llama", "attention": "torch_mha", "quantization": "none"}
    assert plan.choice("attention").name == "torch_mla"
    lines, before = ({line.name: line.bytes for line in p.budget} for p in (plan, plain))
    assert lines["weights"] == before["weights"]
    alone = planned({**DUMMY, "model": str(make())})
    own = {line.name: line.bytes for line in alone.budget}
    assert lines["draft weights"] == own["weights"]
    per_token = [p.sizes.kv_bytes // p.sizes.num_pages for p in (plan, plain, alone)]
    assert per_token[0] == per_token[1]
    assert lines["draft kv cache"] == plan.sizes.num_pages * per_token[2]
    rotary = [found["rotary tables"] for found in (lines, before)]
    assert rotary[0] - rotary[1] == plan.sizes.context_length * 16 * 4
    assert EnginePlan.from_json(plan.to_json()) == plan
    own_plan = plan.of_draft()
    assert own_plan.facts.model == plan.facts.draft and own_plan.facts.draft is None
    assert own_plan.choice("attention").name == "torch_mha"


def test_the_cache_of_the_draft_takes_pages_from_the_targets(
    planned: Any, target: Path, make: Any
) -> None:
    """A given number of bytes holds both caches."""
    memory = {"kv_bytes": 1 << 20}
    plain = planned({**DUMMY, "model": str(target), "memory": memory})
    plan = planned({**configured(target, make()), "memory": memory})
    cache = {line.name: line.bytes for line in plan.budget}
    assert plan.sizes.num_pages < plain.sizes.num_pages
    assert cache["kv cache"] + cache["draft kv cache"] <= 1 << 20


def test_a_backend_that_fits_both_serves_both(planned: Any, make: Any, tmp_path: Path) -> None:
    """A given backend is the draft's too, if it computes the draft's attention."""
    llama = write_model(tmp_path / "llama", {**DRAFT, "num_hidden_layers": 6})
    sheet = {"hardware": read_sheet("1xh200")}
    config = configured(llama, make(), steps=2, topk=2)
    for name in ("triton_mha", "torch_mha"):
        plan = planned({**config, "attention": {"use": name}}, **sheet)
        assert plan.of_draft().choice("attention").name == name
    v3 = configured(write_model(tmp_path / "v3", TARGET), make())
    plan = planned({**v3, "attention": {"use": "triton_mla", "page_size": 16}}, **sheet)
    assert plan.choice("attention").name == "triton_mla"
    assert plan.of_draft().choice("attention").name.endswith("_mha")


def test_a_backend_that_does_not_fit_the_draft_is_replaced(
    planned: Any, make: Any, tmp_path: Path
) -> None:
    """A given backend for some sizes of heads leaves the draft's to the plan."""
    llama = write_model(tmp_path / "llama", {**DRAFT, "head_dim": 128})
    config = {**configured(llama, make(head_dim=24)), "attention": {"use": "hopper_mha"}}
    plan = planned(config, hardware=read_sheet("1xh200"))
    assert plan.choice("attention").name == "hopper_mha"
    assert plan.of_draft().choice("attention").name != "hopper_mha"


def test_the_draft_keeps_its_cache_in_the_compute_dtype(
    planned: Any, make: Any, tmp_path: Path
) -> None:
    v3 = write_model(tmp_path / "v3", TARGET)
    config = {**configured(v3, make()), "attention": {"kv_dtype": "fp8_e4m3"}}
    plan = planned(config, hardware=read_sheet("1xh200"))
    assert plan.kv_dtype == "fp8_e4m3" and plan.of_draft().kv_dtype == plan.dtype


def test_ranks_split_the_draft_like_the_model(planned: Any, target: Path, make: Any) -> None:
    draft = make()
    one = planned(configured(target, draft))
    parallel = [{"use": "tensor", "size": 2}]
    two = planned(
        {**configured(target, draft), "parallel": parallel, "executor": {"oversubscribe": True}}
    )
    weights, half = (
        next(line.bytes for line in plan.budget if line.name == "draft weights")
        for plan in (one, two)
    )
    assert 0.5 * weights <= half < 0.6 * weights
    said = {decision.field: decision for decision in two.decisions}
    assert said["draft.parallel"].value == "split"
    assert "draft.parallel" not in {decision.field for decision in one.decisions}


@pytest.mark.parametrize("sheet", ["1xh200", "4xh200"])
def test_a_device_has_memory_for_the_draft(
    planned: Any, target: Path, make: Any, sheet: str
) -> None:
    """Graphs of the draft's passes and the buffers of its attention count."""
    parallel = [{"use": "tensor", "size": 2}] if sheet.startswith("4") else []
    config: dict[str, Any] = {**DUMMY, "model": str(target), "parallel": parallel}
    hardware = read_sheet(sheet)
    plain = planned(config, hardware=hardware)
    plan = planned({**configured(target, make()), "parallel": parallel}, hardware=hardware)
    lines, before = ({line.name: line.bytes for line in p.budget} for p in (plan, plain))
    assert lines["graphs"] > before["graphs"]
    assert lines["draft kv cache"] > 0 and plan.sizes.extend_tokens == ()


def test_another_draft_is_another_fingerprint(planned: Any, target: Path, make: Any) -> None:
    first = planned(configured(target, make())).fingerprint
    assert first == planned(configured(target, make())).fingerprint
    assert first != planned(configured(target, make(num_hidden_layers=1))).fingerprint


# ---- refusals ------------------------------------------------------------------------------------


def test_a_draft_must_be_given(refusals: Any, target: Path) -> None:
    (found,) = refusals(configured(target, None))
    assert found.field == USE and "no folder of one is given" in found.reason
    assert FIELD in found.fix and 'speculative.use = "none"' in found.fix


def test_a_missing_folder(refusals: Any, target: Path, tmp_path: Path) -> None:
    (found,) = refusals(configured(target, tmp_path / "nowhere"))
    assert found.field == FIELD and "nowhere" in found.reason


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"vocab_size": 300}, FIELD, "vocabulary size is 300, the model's is 256"),
        ({"max_position_embeddings": 64}, "context_length", "longest sequence has 64 tokens"),
        ({"architectures": ["NoSuchModel"]}, USE, "no plugin builds the draft model"),
        ({"quantization_config": {"quant_method": "gptq"}}, FIELD, "gptq"),
        ({"num_attention_heads": 0}, FIELD, "num_attention_heads"),
    ],
)
def test_a_draft_that_does_not_fit(
    refusals: Any, target: Path, make: Any, changes: dict[str, Any], field: str, reason: str
) -> None:
    found = refusals(configured(target, make(**changes)))
    assert [r.field for r in found] == [field], found
    assert reason in found[0].reason


def test_a_short_draft_runs_with_a_short_context(
    planned: Any, refusals: Any, target: Path, make: Any
) -> None:
    config = configured(target, make(max_position_embeddings=64))
    (found,) = refusals(config)
    assert found.fix == "context_length = 64"
    assert planned({**config, "context_length": 64}).sizes.context_length == 64


def test_another_tokenizer(refusals: Any, target: Path, make: Any) -> None:
    draft = make()
    for folder, vocab in ((draft, {"a": 0, "b": 1}), (target, {"a": 0, "c": 1})):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    (found,) = refusals(configured(target, draft))
    assert found.field == FIELD and "another tokenizer" in found.reason


def test_drafts_of_other_algorithms(refusals: Any, target: Path, tmp_path: Path) -> None:
    """Heads and next-token layers are refused with the algorithm that drafts with them."""
    head = write_head(tmp_path / "head", {**V3_HEAD, "vocab_size": VOCAB})
    for folder, what, name in (
        (head, "an EAGLE head", '"eagle"'),
        (write_model(tmp_path / "layer", LAYER), "a next-token layer", '"nextn"'),
    ):
        (found,) = refusals(configured(target, folder))
        assert found.field == USE and what in found.reason and name in found.fix


def test_whole_models_are_no_heads(refusals: Any, target: Path, make: Any) -> None:
    """The other algorithms refuse a whole model of another family."""
    for name in ("eagle", "nextn"):
        config = configured(target, make())
        config["speculative"]["use"] = name
        assert any("LlamaForCausalLM" in r.reason for r in refusals(config))


@pytest.mark.parametrize("strategy", ["dp_attention", "ep_moe"])
def test_groups_and_divided_experts(refusals: Any, target: Path, make: Any, strategy: str) -> None:
    parallel = [{"use": "tensor", "size": 2}, {"use": strategy, "size": 2}]
    config = {**configured(target, make()), "parallel": parallel}
    found = refusals({**config, "executor": {"oversubscribe": True}})
    assert [r.field for r in found] == ["parallel.1.use"]
    assert "tensor parallelism only" in found[0].reason and strategy in found[0].fix


def test_ranks_that_cannot_split_the_draft(refusals: Any, target: Path, make: Any) -> None:
    parallel = [{"use": "tensor", "size": 2}]
    draft = make(num_attention_heads=3, num_key_value_heads=3, head_dim=16)
    config = {**configured(target, draft), "parallel": parallel}
    found = refusals({**config, "executor": {"oversubscribe": True}})
    assert any("does not split over 2 ranks" in r.reason for r in found)
    assert {r.field for r in found} == {"parallel.0.size"}
    assert all("the draft model" in r.reason and "= 1" in r.fix for r in found)


def test_blocks_of_the_drafts_own_format_stay_whole(refusals: Any, target: Path, make: Any) -> None:
    """The quantisation of the draft decides where ranks may split it, not that of the model."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    draft = make(hidden_size=128, intermediate_size=128, quantization_config=fp8)
    parallel = [{"use": "tensor", "size": 2}]
    config = {**configured(target, draft), "parallel": parallel}
    found = refusals(config, hardware=read_sheet("4xh200"))
    assert any("blocks of 128" in r.reason and "the draft model" in r.reason for r in found)


def test_weights_that_are_not_there(refusals: Any, planned: Any, make: Any) -> None:
    """Weights are made up for the draft only if they are for the model."""
    config = configured(Path("embedded"), make(vocab_size=2048, max_position_embeddings=2048))
    config["weights"] = {"use": "safetensors"}
    (found,) = refusals(config)
    assert found.field == FIELD and "holds no weights" in found.reason
    assert planned({**config, **DUMMY}).draft_choices


@pytest.mark.parametrize("knobs", [{"steps": 0}, {"topk": 0}, {"draft_tokens": 9}])
def test_impossible_knobs(refusals: Any, target: Path, make: Any, knobs: dict[str, int]) -> None:
    (found,) = refusals(configured(target, make(), **knobs))
    assert found.by == "standalone" and found.field == f"speculative.{next(iter(knobs))}"


def test_attention_for_chains_only_drafts_chains(planned: Any, make: Any, tmp_path: Path) -> None:
    """A tree becomes a chain if the target's attention reads chains only."""
    heads = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    v3 = write_model(tmp_path / "v3", {**TARGET, **heads, "kv_lora_rank": 512})
    config = configured(v3, make(), steps=2, topk=2)
    sheet = {"hardware": read_sheet("1xh200")}
    for name, is_tree in (("fa3_mla", False), ("triton_mla", True)):
        plan = planned({**config, "attention": {"use": name}}, **sheet)
        assert plan.sizes.draft_shape.is_tree == is_tree


# ---- commands of other engines -------------------------------------------------------------------


def test_commands_of_other_engines(
    planned: Any, plugins: PluginSet, target: Path, make: Any
) -> None:
    """The flags of SGLang and the object of vLLM name the same drafts."""
    draft = str(make())
    flags = given(
        plugins,
        *("--model", str(target), "--load-format", "dummy"),
        *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "4"),
    )
    plan = planned(flags.config)
    assert plan.choice("speculative").name == "standalone" and plan.sizes.width == 4
    for method in ({"method": "draft_model"}, {}):
        text = json.dumps({**method, "model": draft, "num_speculative_tokens": 3})
        made = given(
            plugins, "--model", str(target), "--load-format", "dummy", "--speculative-config", text
        )
        assert made.config["speculative"] == {
            "use": "standalone",
            "draft_model": draft,
            "steps": 3,
        }
        assert planned(made.config).sizes == plan.sizes


def test_a_folder_without_a_method_names_the_algorithm(plugins: PluginSet, tmp_path: Path) -> None:
    layer = str(write_model(tmp_path / "layer", LAYER))
    text = json.dumps({"model": layer, "num_speculative_tokens": 1})
    assert given(plugins, "--speculative-config", text).config["speculative"]["use"] == "nextn"
