"""Drafts in the plan: a next-token layer of the checkpoint or of a folder of its own, and refusals
of all that do not fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.checks.speculation import tokenizer_difference
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.testing.harness.fakes import TINY_LLAMA, TINY_V3, write_model
from glowplug.plugins.speculative.nextn import NextNOptions
from tests.plan.test_refusals import with_components

NEXTN = {**TINY_V3, "num_nextn_predict_layers": 1}
ALONE = {
    **TINY_V3,
    "architectures": ["DeepseekV3ForCausalLMNextN"],
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 1,
}
FIELD = "speculative.draft_model"
Make = Callable[..., Path]


def speculative(**options: Any) -> dict[str, Any]:
    return {"use": "nextn", **options}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A function that makes a folder with config.json and optionally a tokenizer; ``changes`` of
    None remove a key.
    """

    def run(
        name: str, config: dict[str, Any], vocab: dict[str, int] | None = None, **changes: Any
    ) -> Path:
        whole = {key: value for key, value in {**config, **changes}.items() if value is not None}
        folder = write_model(tmp_path / name, whole)
        if vocab is not None:
            (folder / "tokenizer.json").write_text(
                json.dumps({"model": {"vocab": vocab}, "added_tokens": []})
            )
        return folder

    return run


@pytest.fixture
def refusals(planned: Any) -> Callable[..., list[Refusal]]:
    def run(config: dict[str, Any]) -> list[Refusal]:
        with pytest.raises(PlanRefused) as caught:
            planned(config)
        assert all(r.by and r.field and r.reason and r.fix for r in caught.value.refusals)
        return list(caught.value.refusals)

    return run


def decisions(plan: EnginePlan) -> dict[str, Any]:
    return {decision.field: decision.value for decision in plan.decisions}


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3])
def test_the_checkpoints_own_layer(planned: Any, make: Make, steps: int) -> None:
    model = str(make("target", NEXTN))
    plain, plan = (
        planned({"model": model}),
        planned({"model": model, "speculative": speculative(steps=steps)}),
    )
    assert (plan.sizes.draft_layers, plan.sizes.width, plan.sizes.lookahead) == (
        1,
        steps + 1,
        1,
    )
    assert plan.sizes.draft_shape == DraftShape.chain(steps)
    assert (plain.sizes.draft_layers, plain.sizes.width, plain.sizes.lookahead) == (0, 1, 0)
    lines, before = ({line.name: line.bytes for line in p.budget} for p in (plan, plain))
    assert lines["weights"] == before["weights"] and lines["draft weights"] > 0
    assert lines["page states"] == plan.sizes.num_pages * TINY_V3["hidden_size"] * 4
    token = (
        4 * (TINY_V3["kv_lora_rank"] + TINY_V3["qk_rope_head_dim"]) * 4
    )  # three layers and the draft's, in float32
    assert plan.sizes.kv_bytes == plan.sizes.num_pages * plan.sizes.page_size * token
    assert not {"draft weights", "page states"} & before.keys()


def test_the_first_of_several_layers(planned: Any, make: Make) -> None:
    """Two next-token layers in the checkpoint cost as much as one, which the plan states."""
    tensors = {
        f"model.layers.{3 + number}.eh_proj.weight": ("BF16", (128, 256)) for number in range(2)
    }
    folder = write_model(make("target", NEXTN), {**NEXTN, "num_nextn_predict_layers": 2}, tensors)
    plan = planned({"model": str(folder), "speculative": speculative()})
    assert plan.facts.model.nextn_layers == 2 and plan.sizes.draft_layers == 1
    assert {line.name: line.bytes for line in plan.budget}["draft weights"] == 128 * 256 * 4
    assert decisions(plan)["speculative.layers"] == 1
    assert "the first of 2" in next(
        d.why for d in plan.decisions if d.field == "speculative.layers"
    )


class AllLayers(NextNOptions):
    use: Literal["all_layers"] = "all_layers"  # type: ignore[assignment]

    def draft_layers(self, draft: ModelFacts) -> int:
        return draft.nextn_layers


def test_an_algorithm_may_use_all_layers(planned: Any, make: Make) -> None:
    found = load_plugins().find("speculative", "nextn")
    assert found is not None
    own = replace(found.component, name="all_layers", options=AllLayers)
    plugins = with_components(speculative=[own])
    folder = str(make("target", {**NEXTN, "num_nextn_predict_layers": 3}))

    def plan(use: str) -> EnginePlan:
        made: EnginePlan = planned(
            {"model": folder, "speculative": speculative(use=use)}, plugins=plugins
        )
        return made

    one, three = plan("nextn"), plan("all_layers")
    assert (one.sizes.draft_layers, three.sizes.draft_layers) == (1, 3)
    pool = [made.sizes.kv_bytes / made.sizes.num_pages for made in (one, three)]
    assert pool[1] / pool[0] == (3 + 3) / (3 + 1)
    weights = [
        {line.name: line.bytes for line in made.budget}["draft weights"] for made in (one, three)
    ]
    assert weights[1] == 3 * weights[0]
    assert "speculative.layers" in decisions(one).keys() - decisions(three).keys()


def test_a_sequence_leaves_room_for_what_is_drafted(planned: Any, make: Make) -> None:
    config = {
        "model": str(make("target", NEXTN)),
        "memory": {"kv_tokens": 320},
        "attention": {"page_size": 16},
    }
    assert planned(config).sizes.context_length == 320 - 1
    plan = planned({**config, "speculative": speculative(steps=3)})
    assert plan.sizes.context_length == 320 - 4 - 1 and plan.sizes.positions == 320


def test_a_tree_has_room_for_the_entries_of_its_passes(planned: Any, make: Make) -> None:
    """Five steps of four branches compute 17 tokens of the draft, eight are verified."""
    config = {
        "model": str(make("target", NEXTN)),
        "memory": {"kv_tokens": 320},
        "attention": {"page_size": 16},
        "speculative": speculative(steps=5, topk=4, draft_tokens=8),
    }
    sizes = planned(config).sizes
    assert sizes.draft_shape == DraftShape(5, 4, 8)
    assert sizes.width == 8 and sizes.lookahead == 17 - 8 and sizes.positions == 320


def test_attention_for_chains_turns_a_given_tree_into_a_chain(planned: Any, make: Make) -> None:
    """The operator's choice of attention is kept, and the plan states the chain."""
    folder = str(make("target", NEXTN))
    tree = speculative(steps=2, topk=4, draft_tokens=4)
    chains = {"attention": {"use": "chains_only"}}
    plugins = load_plugins(["tests.plugins.chains_only"], entry_points=False)
    plan = planned({"model": folder, "speculative": tree, **chains}, plugins=plugins)
    assert plan.sizes.draft_shape == DraftShape.chain(2) and plan.sizes.width == 3
    remark = next(d for d in plan.decisions if d.field == "speculative.topk" and d.notable)
    assert remark.value == 1 and "causal chains only" in remark.why
    free = planned({"model": folder, "speculative": tree}, plugins=plugins)
    assert free.sizes.draft_shape == DraftShape(2, 4, 4)


def test_a_folder_of_its_own(planned: Any, make: Make) -> None:
    """The target then needs no next-token layer; the draft's facts are part of the plan."""
    target, draft = make("target", TINY_V3), make("draft", ALONE)
    plan = planned(
        {"model": str(target), "speculative": speculative(steps=2, draft_model=str(draft))}
    )
    assert plan.facts.draft is not None and plan.facts.draft.path == str(draft)
    assert (plan.facts.draft.num_layers, plan.facts.draft.nextn_layers) == (0, 1)
    again = EnginePlan.from_json(plan.to_json())
    assert again == plan and plan.sizes.draft_layers == 1
    own = planned({"model": str(make("with", NEXTN)), "speculative": speculative(steps=2)})
    assert own.facts.draft is None
    weights = [{line.name: line.bytes for line in p.budget}["draft weights"] for p in (plan, own)]
    assert weights[0] == weights[1]


def test_a_whole_checkpoint_may_be_the_draft(planned: Any, make: Make) -> None:
    folder = str(make("target", NEXTN))
    assert (
        planned({"model": folder, "speculative": speculative(draft_model=folder)}).facts.draft
        is not None
    )


# ---- refusals ------------------------------------------------------------------------------------


def test_a_draft_without_a_layer_is_refused(refusals: Any, make: Make) -> None:
    found = refusals({"model": str(make("target", TINY_V3)), "speculative": speculative()})
    assert [r.field for r in found] == ["speculative.use"]
    assert (
        "has none" in found[0].reason
        and 'speculative.use = "none"' in found[0].fix
        and FIELD in found[0].fix
    )


def test_a_layer_that_config_states_and_the_files_lack(refusals: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "saved", NEXTN, {"model.norm.weight": ("BF16", (128,))})
    found = refusals({"model": str(folder), "speculative": speculative()})
    assert "config.json states 1 next-token layers, the checkpoint holds none" in found[0].reason


def test_a_family_without_such_layers(refusals: Any, llama: Path) -> None:
    found = refusals({"model": str(llama), "speculative": speculative()})
    assert [r.field for r in found] == ["speculative.use"] and "llama does not build" in found[
        0
    ].reason


@pytest.mark.parametrize(
    ("options", "field", "reason", "fix"),
    [
        (
            {"steps": 3, "draft_tokens": 3},
            "speculative.draft_tokens",
            "a chain of 3 steps verifies 4",
            "= 4",
        ),
        ({"topk": 0}, "speculative.topk", "topk is 0", "topk = 1"),
        (
            {"steps": 1, "topk": 4, "draft_tokens": 6},
            "speculative.draft_tokens",
            "1 steps of 4 branches make 4 drafts at most",
            "= 5",
        ),
        ({"steps": 0}, "speculative.steps", "steps is 0", "steps = 1"),
        ({"steps": 99}, "speculative.steps", "steps is 99", "steps = 15"),
    ],
)
def test_knobs_that_cannot_be_met(
    refusals: Any, make: Make, options: dict[str, Any], field: str, reason: str, fix: str
) -> None:
    found = refusals({"model": str(make("target", NEXTN)), "speculative": speculative(**options)})
    assert [r.field for r in found] == [field] and reason in found[0].reason and fix in found[0].fix


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 256}, "hidden size is 256, the model's is 128"),
        ({"vocab_size": 600}, "vocabulary size is 600, the model's is 512"),
        ({"kv_lora_rank": 128}, "latent size (kv_lora_rank) is 128, the model's is 64"),
        ({"qk_rope_head_dim": 32}, "rotary size (qk_rope_head_dim) is 32, the model's is 16"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "fp8 in 128x128 blocks, the model's are not quantised",
        ),
        (
            {"architectures": ["DeepseekV2ForCausalLM"]},
            "is a DeepseekV2ForCausalLM, not a next-token layer",
        ),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": None},
            "holds no next-token layer",
        ),
    ],
)
def test_a_draft_that_does_not_fit(
    refusals: Any, make: Make, changes: dict[str, Any], reason: str
) -> None:
    draft = make("draft", ALONE, **changes)
    found = refusals(
        {"model": str(make("target", NEXTN)), "speculative": speculative(draft_model=str(draft))}
    )
    assert {r.field for r in found} == {FIELD}
    assert any(reason in r.reason for r in found), found
    assert all("export-nextn" in r.fix for r in found)


def test_everything_wrong_with_a_draft_at_once(refusals: Any, make: Make) -> None:
    draft = make("draft", {**TINY_LLAMA}, {"a": 0, "b": 1})
    target = make("target", NEXTN, {"a": 0, "c": 1})
    reasons = " ".join(
        r.reason
        for r in refusals(
            {"model": str(target), "speculative": speculative(draft_model=str(draft), topk=0)}
        )
    )
    for part in (
        "LlamaForCausalLM",
        "hidden size",
        "vocabulary size",
        "kind of attention is mha",
        "another tokenizer",
        "topk is 0",
    ):
        assert part in reasons, part


@pytest.mark.parametrize("folder", ["/no/such/folder", "someone/unseen"])
def test_a_missing_draft(refusals: Any, make: Make, folder: str) -> None:
    found = refusals(
        {"model": str(make("target", NEXTN)), "speculative": speculative(draft_model=folder)}
    )
    assert [r.field for r in found] == [FIELD] and "no folder or file" in found[0].reason
    assert "leave it out" in found[0].fix


def test_a_damaged_draft(refusals: Any, make: Make) -> None:
    draft = make("draft", ALONE)
    (draft / "config.json").write_text("{")
    found = refusals(
        {"model": str(make("target", NEXTN)), "speculative": speculative(draft_model=str(draft))}
    )
    assert [r.field for r in found] == [FIELD] and "could not be read as JSON" in found[0].reason


def test_a_draft_without_weights(planned: Any, make: Make, tmp_path: Path) -> None:
    target = write_model(tmp_path / "full", TINY_V3, {"model.norm.weight": ("BF16", (128,))})
    with pytest.raises(PlanRefused) as caught:
        planned(
            {
                "model": str(target),
                "weights": {"use": "safetensors"},
                "speculative": speculative(draft_model=str(make("draft", ALONE))),
            }
        )
    assert [(r.field, "holds no weights" in r.reason) for r in caught.value.refusals] == [
        (FIELD, True)
    ]


def test_a_draft_is_not_served_alone(refusals: Any, make: Make) -> None:
    draft = make("draft", ALONE)
    found = refusals({"model": str(draft)})
    assert [r.field for r in found] == ["model"]
    assert "cannot run alone" in found[0].reason and f'{FIELD} = "{draft}"' in found[0].fix


# ---- tokenizers ----------------------------------------------------------------------------------


def test_tokenizers_are_compared_by_the_meaning_of_ids(
    planned: Any, refusals: Any, make: Make
) -> None:
    vocab = {"a": 0, "b": 1, "c": 2}
    target = make("target", NEXTN, vocab)
    same = make("same", ALONE, dict(reversed(vocab.items())))  # another file with the same meaning
    config = {"model": str(target), "speculative": speculative(draft_model=str(same))}
    assert planned(config).facts.draft is not None
    swapped = make("swapped", ALONE, {"a": 0, "c": 1, "b": 2})
    found = refusals({**config, "speculative": speculative(draft_model=str(swapped))})
    assert [r.field for r in found] == [FIELD]
    assert "2 token ids have other text, the first is 1: 'c' instead of 'b'" in found[0].reason


def test_tokenizers_that_cannot_be_compared(make: Make) -> None:
    target, bare = make("target", NEXTN, {"a": 0}), make("bare", ALONE)
    assert tokenizer_difference(str(bare), str(target)) == ""
    broken = make("broken", ALONE, {"a": 0})
    (broken / "tokenizer.json").write_text("[1, 2]")
    assert "could not be read" in tokenizer_difference(str(broken), str(target))
    unigram = make("unigram", ALONE)
    (unigram / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["a", -1.0]]}}))
    assert tokenizer_difference(str(unigram), str(target)) == ""
