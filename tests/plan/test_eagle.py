"""EAGLE heads in the plan: sizes, names in other engines' commands, and refusals of all that does
not fit.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.testing.harness.fakes import TINY_LLAMA, TINY_V3, write_model
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.cli.flags.command_line import CommandLine, read_command_line
from glowplug.entrypoints.cli.flags.parser import Parser


def given(plugins: PluginSet, *words: str) -> CommandLine:
    parser = Parser(prog="glowplug serve")
    add_engine_options(parser)
    return read_command_line(parser.parse_args(list(words)), plugins)


FIELD = "speculative.draft_model"
USE = "speculative.use"
LLAMA_HEAD = {
    **TINY_LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 100,
}
V3_HEAD = {
    **{key: value for key, value in TINY_V3.items() if "expert" not in key},
    "architectures": ["Eagle3DeepseekV3ForCausalLM"],
    "num_hidden_layers": 1,
}
Shapes = dict[str, tuple[str, tuple[int, ...]]]


def head_shapes(config: Mapping[str, Any]) -> Shapes:
    """Return the tensors that checks read: the projection and the draft vocabulary."""
    hidden = config["hidden_size"]
    shapes: Shapes = {"fc.weight": ("BF16", (hidden, 3 * hidden))}
    size = config.get("draft_vocab_size")
    if size:
        shapes |= {"lm_head.weight": ("BF16", (size, hidden)), "d2t": ("I64", (size,))}
    return shapes


def write_head(
    folder: Path,
    config: Mapping[str, Any],
    shapes: Shapes | None = None,
    offsets: Any = None,
) -> Path:
    """Write a head's folder of zeros; ``offsets`` are the values of d2t."""
    shapes = head_shapes(config) if shapes is None else shapes
    write_model(folder, config, {name: shape for name, shape in shapes.items() if name != "d2t"})
    if "d2t" in shapes:
        values = np.zeros(shapes["d2t"][1], "<i8") if offsets is None else np.array(offsets, "<i8")
        header = {
            "d2t": {"dtype": "I64", "shape": list(values.shape), "data_offsets": [0, values.nbytes]}
        }
        raw = json.dumps(header).encode()
        data = struct.pack("<Q", len(raw)) + raw + values.tobytes()
        (folder / "ids.safetensors").write_bytes(data)
    return folder


@pytest.fixture
def targets(tmp_path: Path) -> dict[str, Path]:
    return {
        "llama": write_model(tmp_path / "llama-target", {**TINY_LLAMA, "num_hidden_layers": 6}),
        "v3": write_model(tmp_path / "v3-target", {**TINY_V3, "num_hidden_layers": 6}),
    }


@pytest.fixture
def refusals(planned: Any) -> Callable[..., list[Refusal]]:
    def run(target: Path, head: Path | None, **options: Any) -> list[Refusal]:
        speculative = {"use": "eagle", **options}
        if head is not None:
            speculative["draft_model"] = str(head)
        with pytest.raises(PlanRefused) as caught:
            planned({"model": str(target), "speculative": speculative})
        assert all(r.by and r.field and r.reason and r.fix for r in caught.value.refusals)
        return list(caught.value.refusals)

    return run


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "config"), [("llama", LLAMA_HEAD), ("v3", V3_HEAD)], ids=["llama", "v3"]
)
def test_a_head_is_planned_with_its_target(
    planned: Any, targets: dict[str, Path], tmp_path: Path, kind: str, config: dict[str, Any]
) -> None:
    target = str(targets[kind])
    head = write_head(tmp_path / "head", config)
    options = {"use": "eagle", "steps": 2, "draft_model": str(head)}
    plain = planned({"model": target})
    plan = planned({"model": target, "speculative": options})
    assert (plan.sizes.draft_layers, plan.sizes.width) == (1, 3)
    assert plan.facts.draft is not None and plan.facts.draft.path == str(head)
    lines, before = ({line.name: line.bytes for line in p.budget} for p in (plan, plain))
    stored = head_shapes(config)
    numbers = sum(int(np.prod(shape)) for name, (_, shape) in stored.items() if name != "d2t")
    assert 0.9 * 4 * numbers <= lines["draft weights"] <= 4 * numbers
    assert lines["weights"] == before["weights"] and "draft weights" not in before
    assert lines["page states"] == plan.sizes.num_pages * config["hidden_size"] * 4
    tokens = [p.sizes.kv_bytes / p.sizes.num_pages / p.sizes.page_size for p in (plan, plain)]
    assert tokens[0] / tokens[1] == 7 / 6, "the head's layer has a cache of its own"
    assert EnginePlan.from_json(plan.to_json()) == plan


def test_a_head_without_files_is_sized_by_its_config(
    planned: Any, targets: dict[str, Path], tmp_path: Path
) -> None:
    head = write_model(tmp_path / "head", LLAMA_HEAD)
    options = {"use": "eagle", "draft_model": str(head)}
    plan = planned({"model": str(targets["llama"]), "speculative": options})
    hidden, size = 64, 16
    attention = 2 * hidden * (4 * size + 2 * 2 * size) + 4 * size * hidden
    others = 3 * hidden * 128 + 3 * hidden * hidden + 4 * hidden + 100 * hidden
    found = {line.name: line.bytes for line in plan.budget}["draft weights"]
    assert abs(found / 4 / (attention + others) - 1) < 0.3


def test_the_embedded_model_has_a_head_of_its_own(planned: Any) -> None:
    plan = planned({"model": "embedded", "speculative": {"use": "eagle"}})
    assert plan.facts.draft is not None
    assert plan.facts.draft.architecture == "Eagle3DeepseekV3ForCausalLM"
    assert Path(plan.facts.draft.path).parent == Path(plan.facts.model.path).parent


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "cuda"])
def test_features_are_kept_until_a_pass_ends(
    planned: Any, targets: dict[str, Path], tmp_path: Path, on_device: bool
) -> None:
    """A step holds one hidden state more for each feature of a token."""
    bare = {**V3_HEAD, "eagle_config": {"use_aux_hidden_state": False}}
    heads = [
        write_head(tmp_path / "bare", bare, {"norm.weight": ("BF16", (128,))}),
        write_head(tmp_path / "head", V3_HEAD),
    ]
    hardware = {"hardware": read_sheet("1xh200")} if on_device else {}
    found = []
    for head in heads:
        config = {
            "model": str(targets["v3"]),
            "scheduler": {"chunk_size": 2048},
            "speculative": {"use": "eagle", "draft_model": str(head)},
        }
        plan = planned(config, **hardware)
        line = next(line for line in plan.budget if line.name == "activations")
        found.append((plan.sizes.max_step_tokens, plan.dtype, line.bytes))
    (tokens, dtype, plain), (same, _, held) = found
    element = 4 if dtype == "float32" else 2
    assert same == tokens
    assert held - plain >= 3 * tokens * V3_HEAD["hidden_size"] * element


# ---- refusals ------------------------------------------------------------------------------------


def test_a_head_must_be_given(refusals: Any, targets: dict[str, Path]) -> None:
    (found,) = refusals(targets["llama"], None)
    assert found.field == USE and "no folder of one is given" in found.reason
    assert FIELD in found.fix and 'speculative.use = "none"' in found.fix


def test_a_head_cannot_run_alone(planned: Any, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", LLAMA_HEAD)
    with pytest.raises(PlanRefused) as caught:
        planned({"model": str(head)})
    (found,) = caught.value.refusals
    assert "an EAGLE head, which drafts for a model and cannot run alone" in found.reason
    assert f'{FIELD} = "{head}"' in found.fix


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 128, "head_dim": 16}, "hidden size is 128, the model's is 64"),
        ({"vocab_size": 300}, "vocabulary size is 300, the model's is 256"),
        ({"num_key_value_heads": 4}, "number of key heads (num_key_value_heads) is 4"),
        ({"head_dim": 32}, "size of a head is 32, the model's is 16"),
        ({"num_attention_heads": 8, "head_dim": 16}, "number of attention heads is 8"),
        ({"num_hidden_layers": 2}, "has 2 layers; heads of one layer run"),
        ({"intermediate_size": None}, "has no intermediate_size"),
        ({"quantization_config": {"quant_method": "fp8"}}, "heads are loaded unquantised"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}, "the model has 6 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, "fc.weight is 64x192, it reads 128"),
        ({"draft_vocab_size": 999}, "draft vocabulary has 999 tokens"),
        ({"draft_vocab_size": 0}, "draft vocabulary has 0 tokens"),
        ({"draft_vocab_size": 50}, "d2t has 100 ids, draft_vocab_size is 50"),
    ],
)
def test_a_head_that_does_not_fit(
    refusals: Any,
    targets: dict[str, Path],
    tmp_path: Path,
    changes: dict[str, Any],
    reason: str,
) -> None:
    whole = {key: value for key, value in {**LLAMA_HEAD, **changes}.items() if value is not None}
    head = write_head(tmp_path / "head", whole, head_shapes(LLAMA_HEAD))
    found = refusals(targets["llama"], head)
    assert {r.field for r in found} == {FIELD}
    assert any(reason in r.reason for r in found), found


@pytest.mark.parametrize(
    ("offsets", "reason"),
    [
        ([0] * 99 + [157], "maps 1 draft ids out of the model's vocabulary of 256 tokens"),
        ([-1] + [0] * 99, "the first to -1"),
        ([1] + [0] * 99, "maps several draft ids to one token"),
    ],
)
def test_a_draft_vocabulary_outside_the_targets(
    refusals: Any, targets: dict[str, Path], tmp_path: Path, offsets: list[int], reason: str
) -> None:
    head = write_head(tmp_path / "head", LLAMA_HEAD, offsets=offsets)
    (found,) = refusals(targets["llama"], head)
    assert found.field == FIELD and reason in found.reason


@pytest.mark.parametrize("missing", ["d2t", "lm_head.weight", "fc.weight"])
def test_a_head_without_a_tensor(
    refusals: Any, targets: dict[str, Path], tmp_path: Path, missing: str
) -> None:
    shapes = head_shapes(LLAMA_HEAD)
    del shapes[missing]
    (found,) = refusals(targets["llama"], write_head(tmp_path / "head", LLAMA_HEAD, shapes))
    assert found.field == FIELD and f"holds no {missing}" in found.reason


def test_another_tokenizer(refusals: Any, targets: dict[str, Path], tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", LLAMA_HEAD)
    for folder, vocab in ((head, {"a": 0, "b": 1}), (targets["llama"], {"a": 0, "c": 1})):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    (found,) = refusals(targets["llama"], head)
    assert found.field == FIELD and "another tokenizer" in found.reason


def test_drafts_of_another_algorithm(
    planned: Any, refusals: Any, targets: dict[str, Path], tmp_path: Path
) -> None:
    """A next-token layer is no head and a head no next-token layer; the fix names the algorithm."""
    layer = {**TINY_V3, "architectures": ["DeepseekV3ForCausalLMNextN"], "num_hidden_layers": 1}
    (found,) = refusals(targets["v3"], write_model(tmp_path / "layer", layer))
    assert "not an EAGLE head" in found.reason and '"nextn"' in found.fix
    head = write_head(tmp_path / "head", V3_HEAD)
    config = {
        "model": str(targets["v3"]),
        "speculative": {"use": "nextn", "draft_model": str(head)},
    }
    with pytest.raises(PlanRefused) as caught:
        planned(config)
    assert any("an EAGLE head, not a next-token layer" in r.reason for r in caught.value.refusals)
    assert any('"eagle"' in r.fix for r in caught.value.refusals)


def test_a_head_for_another_family(refusals: Any, targets: dict[str, Path], tmp_path: Path) -> None:
    head = write_head(
        tmp_path / "head", {**LLAMA_HEAD, "architectures": ["Eagle3DeepseekV3ForCausalLM"]}
    )
    (found,) = refusals(targets["llama"], head)
    assert "not an EAGLE head for LlamaForCausalLM" in found.reason


def test_more_branches_than_draft_ids(
    refusals: Any, targets: dict[str, Path], tmp_path: Path
) -> None:
    config = {**LLAMA_HEAD, "draft_vocab_size": 4}
    found = refusals(
        targets["llama"], write_head(tmp_path / "head", config), steps=2, topk=5, draft_tokens=6
    )
    assert any(
        r.field == "speculative.topk" and "drafts 4 different tokens" in r.reason for r in found
    )


# ---- heads with attention of their own -----------------------------------------------------------

OWN_HEAD = {**LLAMA_HEAD, "hidden_size": 128, "vocab_size": 512, "head_dim": 24}


def of_v3(targets: dict[str, Path], head: Path, **config: Any) -> dict[str, Any]:
    options = {"use": "eagle", "steps": 2, "draft_model": str(head)}
    return {"model": str(targets["v3"]), "speculative": options, **config}


def test_a_head_of_another_kind_has_a_cache_of_its_own(
    planned: Any, targets: dict[str, Path], tmp_path: Path
) -> None:
    """The target's cache has no layer for the head; the head's has its keys and values."""
    head = write_head(tmp_path / "head", OWN_HEAD)
    plain = planned({"model": str(targets["v3"])})
    plan = planned(of_v3(targets, head))
    assert {one.slot: one.name for one in plan.draft_choices} == {
        "model": "llama",
        "attention": "torch_mha",
    }
    assert (plan.sizes.draft_layers, plan.sizes.draft_extends) == (0, True)
    assert not plan.whole_draft
    tokens = [p.sizes.kv_bytes / p.sizes.num_pages / p.sizes.page_size for p in (plan, plain)]
    assert tokens[0] == tokens[1]
    own = plan.of_draft().kv_layout(lambda context: plan.draft_kv_entries)
    assert own.token_bytes == 2 * OWN_HEAD["num_key_value_heads"] * 24 * 4
    lines, before = ({line.name: line.bytes for line in p.budget} for p in (plan, plain))
    stored = head_shapes(OWN_HEAD)
    numbers = sum(int(np.prod(shape)) for name, (_, shape) in stored.items() if name != "d2t")
    assert lines["draft weights"] == 4 * numbers and lines["weights"] == before["weights"]
    assert lines["draft kv cache"] == plan.sizes.num_pages * own.page_bytes
    assert lines["page states"] == plan.sizes.num_pages * OWN_HEAD["hidden_size"] * 4
    assert EnginePlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("shape", [{}, {"topk": 2, "draft_tokens": 4}], ids=["chain", "tree"])
def test_its_attention_on_a_device(
    planned: Any, targets: dict[str, Path], tmp_path: Path, shape: dict[str, int]
) -> None:
    """The head's attention is chosen for the device, whatever the target's is."""
    config = of_v3(targets, write_head(tmp_path / "head", OWN_HEAD))
    config["speculative"] |= shape
    plan = planned({**config, "attention": {"use": "triton_mla"}}, hardware=read_sheet("1xh200"))
    assert plan.choice("attention").name == "triton_mla"
    assert plan.of_draft().choice("attention").name in {"hopper_mha", "triton_mha"}
    assert plan.sizes.draft_shape.is_tree == bool(shape)
    assert plan.sizes.extend_tokens, "its draft extend is captured as that of other heads"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 64}, "hidden size is 64, the model's is 128"),
        ({"vocab_size": 300}, "vocabulary size is 300, the model's is 512"),
        ({"num_hidden_layers": 2}, "has 2 layers; heads of one layer run"),
        ({"draft_vocab_size": 999}, "draft vocabulary has 999 tokens"),
        ({"hidden_act": "gelu"}, "cannot run: config.json has the activation 'gelu'"),
        (
            {"architectures": ["Eagle3DeepseekV3ForCausalLM"]},
            "with mha attention, for which no plugin builds a head",
        ),
    ],
)
def test_such_a_head_that_does_not_fit(
    refusals: Any, targets: dict[str, Path], tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    head = write_head(tmp_path / "head", {**OWN_HEAD, **changes}, head_shapes(OWN_HEAD))
    found = refusals(targets["v3"], head)
    assert {r.field for r in found} == {FIELD}
    assert any(reason in r.reason for r in found), found


def test_its_attention_must_run_on_the_device(
    planned: Any, plugins: PluginSet, targets: dict[str, Path], tmp_path: Path
) -> None:
    """Without attention of the head's kind on this device, the reasons are the backends'."""
    config = of_v3(targets, write_head(tmp_path / "head", OWN_HEAD))
    rest = PluginSet([one for one in plugins.sources if not one.name.endswith("mha.torch")])
    with pytest.raises(PlanRefused) as caught:
        planned(config, plugins=rest)
    (found,) = caught.value.refusals
    assert found.field == FIELD and "the draft model" in found.reason
    assert "triton_mha runs on cuda, the device is cpu" in found.reason
    assert "an EAGLE head trained for this model" in found.fix


# ---- commands of other engines -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE3", "eagle", "eagle3"])
def test_the_folder_of_a_head_makes_it_eagle(plugins: PluginSet, tmp_path: Path, name: str) -> None:
    head = str(write_head(tmp_path / "head", LLAMA_HEAD))
    words = ("--speculative-algorithm", name, "--speculative-draft-model-path", head)
    assert given(plugins, *words).config["speculative"] == {"use": "eagle", "draft_model": head}


def test_the_folder_of_a_layer_makes_it_nextn(plugins: PluginSet, tmp_path: Path) -> None:
    layer = {**TINY_V3, "architectures": ["DeepseekV3ForCausalLMNextN"], "num_hidden_layers": 1}
    folder = str(write_model(tmp_path / "layer", layer))
    for name in ("EAGLE", "eagle"):
        words = ("--speculative-algorithm", name, "--speculative-draft-model-path", folder)
        assert given(plugins, *words).config["speculative"]["use"] == "nextn"
    assert given(plugins, "--speculative-algorithm", "EAGLE").config == {
        "speculative": {"use": "nextn"}
    }


def test_speculation_as_an_object(plugins: PluginSet, tmp_path: Path) -> None:
    head = str(write_head(tmp_path / "head", LLAMA_HEAD))
    for method in ({"method": "eagle3"}, {"method": "eagle"}, {}):
        text = json.dumps({**method, "model": head, "num_speculative_tokens": 2})
        made = given(plugins, "--speculative-config", text)
        assert made.config["speculative"] == {"use": "eagle", "draft_model": head, "steps": 2}
        assert made.layer.origins["speculative.steps"].startswith("--speculative-config")
    text = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
    assert given(plugins, "--speculative_config", text).config["speculative"] == {
        "use": "nextn",
        "steps": 1,
    }
    both = given(plugins, "--speculative-config", text, "--speculative-num-steps", "3")
    assert any("contradict" in refusal.reason for refusal in both.layer.refusals)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("{", "is no JSON object such as"),
        ("[1]", "is no JSON object such as"),
        ('{"method": "eagle", "quantization": "fp8"}', "not quantization: leave it out"),
    ],
)
def test_objects_that_cannot_be_read(
    plugins: PluginSet, capsys: pytest.CaptureFixture[str], text: str, answer: str
) -> None:
    with pytest.raises(SystemExit):
        given(plugins, "--speculative-config", text)
    assert answer in capsys.readouterr().err
