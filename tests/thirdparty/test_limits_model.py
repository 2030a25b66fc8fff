"""A third party's model family whose config.json, modules and experts have names of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from glowplug import SamplingParams
from glowplug.core.facts.model_folder import read_folder
from glowplug.core.plugin.model_reading import architecture_rules
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.step.messages import Submit, packed_ids
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, run_ranks
from glowplug.core.testing.suites.models import ModelSuite
from tests.plan.test_rank_bytes import compare
from tests.support.parity import COMMON, Reference, write
from tests.thirdparty.packages import FOLDER, private_modules

DECLARATION = '''
"""The declaration of the model family "prism". It imports no torch."""

from glowplug.core.api import (
    Component, DecoderNames, Inventory, ModelFacts, ModelOffers, Options, TensorSpec,
    decoder_tensors, hookimpl, weight_classes
)

MIXTRAL = "MixtralForCausalLM"
NAMES = {
    MIXTRAL: DecoderNames(moe="block_sparse_moe", expert_matrices=("w1", "w3", "w2")),
    "PrismForCausalLM": DecoderNames(
        embedding="transformer.wte",
        layer="transformer.h.{layer}",
        norm="transformer.ln_f",
        head="output",
        norms=("ln_1", "ln_2"),
        attention="attn",
        projections=("wq", "wk", "wv", "wo"),
        qk_norms=("q_ln", "k_ln"),
        mlp="ffn",
        matrices=("w1", "w3", "w2"),
        moe="block_sparse_moe",
        router="router",
        experts="units",
        expert_matrices=("w1", "w3", "w2"),
        shared="common",
    ),
}
KEYS = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_head_kv": "num_key_value_heads", "d_head": "head_dim", "n_ctx": "max_position_embeddings",
    "n_inner": "intermediate_size", "n_inner_expert": "moe_intermediate_size",
    "n_expert": "n_routed_experts", "n_expert_used": "num_experts_per_tok",
    "n_expert_shared": "n_shared_experts", "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}


class PrismOptions(Options):
    use: str = "auto"


def normalise(config):
    """Return config.json under the names of the keys that the engine reads."""
    found = {KEYS.get(key, key): value for key, value in config.items()}
    if config["architectures"][0] == MIXTRAL:
        found |= {
            "n_routed_experts": config.get("num_local_experts", 0),
            "moe_intermediate_size": config.get("intermediate_size"),
            "norm_topk": True,
        }
    return {"rms_norm_eps": 1e-6, **found}


def names_of(model: ModelFacts) -> DecoderNames:
    return NAMES[model.architecture]


def has(model: ModelFacts) -> dict[str, bool]:
    """Return the biases and norms that attention has, for ``grouped_attention``."""
    keys = {"bias": "qkv_bias", "out_bias": "out_bias", "qk_norm": "qk_ln"}
    return {name: bool(model.config.get(key)) for name, key in keys.items()}


def inventory(model: ModelFacts) -> Inventory:
    names, layers = names_of(model), range(model.num_layers)
    attention = decoder_tensors.grouped_attention(model, layers, names=names, **has(model))
    routed = (model.n_routed_experts > 0,) * model.num_layers
    bias = bool(model.config.get("ffn_bias"))
    if model.config.get("expert_bias"):
        router = names.within(names.moe, names.router, "e_score_correction_bias")
        role = weight_classes.ROUTER
        attention.append(TensorSpec(router, role, model.n_routed_experts, layers=layers))
    return decoder_tensors.decoder_inventory(
        model,
        attention,
        routed,
        mlp_bias=bias,
        shared_experts=model.config.get("n_shared_experts", 0),
        names=names,
    )


@hookimpl
def register_models():
    return [
        Component(
            name=f"prism{number}",
            options=PrismOptions,
            factory="prism_family:PrismFamily",
            offers=ModelOffers(
                architectures=frozenset({architecture}),
                inventory=inventory,
                normalise=normalise,
                layer_prefix=names.layer_prefix,
            ),
            contract=2,
            summary="Mixtral, and models with its layers under names of their own",
        )
        for number, (architecture, names) in enumerate(NAMES.items())
    ]
'''
RUNTIME = '''
"""The runtime of the model family "prism"."""

from glowplug.core.layers.decoder import DecoderLayer, DecoderModel
from glowplug.core.layers.gate import MoeSizes
from glowplug.core.layers.mha import MhaAttention
from glowplug.core.layers.mlp import Mlp
from glowplug.core.layers.moe import Moe
from glowplug.core.layers.rope import Rope, RopeConfig
from prism_plugin import has, names_of


class PrismFamily:
    def __init__(self, options, plan, worker):
        pass

    def build(self, context):
        facts = context.facts
        rope = Rope(context, RopeConfig.read(facts.config), facts.head_dim, interleaved=False)
        eps, tied = facts.config["rms_norm_eps"], bool(facts.config.get("tie_word_embeddings"))
        return DecoderModel(context, layer, rope, eps, tied, names_of(facts))

    def build_nextn(self, context, target, number=0):
        raise NotImplementedError

    def build_eagle(self, context, target):
        raise NotImplementedError


def layer(context, name, number):
    facts, config, names = context.facts, context.facts.config, names_of(context.facts)
    hidden, eps, flags = facts.hidden_size, config["rms_norm_eps"], has(facts)
    attention = MhaAttention(
        context,
        f"{name}.{names.attention}",
        context.first_layer + number,
        hidden=hidden,
        heads=facts.num_heads,
        kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        scale=facts.head_dim**-0.5,
        bias=flags["bias"],
        out_bias=flags["out_bias"],
        qk_norm_eps=eps if flags["qk_norm"] else None,
        names=names,
    )
    if facts.n_routed_experts:
        sizes = MoeSizes(
            hidden,
            config["moe_intermediate_size"],
            facts.n_routed_experts,
            config["num_experts_per_tok"],
            shared=config.get("n_shared_experts", 0) * config["moe_intermediate_size"],
            sigmoid=bool(config.get("expert_bias")),
            renormalize=bool(config.get("norm_topk")),
            names=names.expert_matrices,
            router=names.router,
            container=names.experts,
            shared_name=names.shared,
        )
        feed_forward = Moe(context, f"{name}.{names.moe}", sizes)
    else:
        width, bias = config["intermediate_size"], bool(config.get("ffn_bias"))
        matrices = names.matrices
        feed_forward = Mlp(
            context, f"{name}.{names.mlp}", hidden, width, bias=bias, matrices=matrices
        )
    return DecoderLayer(context, name, hidden, eps, attention, feed_forward, names)
'''
PLUGIN = ["prism_plugin"]
SMALL: dict[str, Any] = dict(COMMON, num_key_value_heads=2, num_hidden_layers=2, rms_norm_eps=0.01)
EXPERTS: dict[str, Any] = dict(SMALL, num_experts_per_tok=2)
QWEN_MOE = {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "attention_bias": True}
DOTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
}
#: the reference's names, as expressions -> those of a Prism checkpoint
RENAMED = {
    r"^model\.embed_tokens": "transformer.wte",
    r"^model\.norm": "transformer.ln_f",
    r"^lm_head": "output",
    r"^model\.layers\.": "transformer.h.",
    r"\.input_layernorm\.": ".ln_1.",
    r"\.post_attention_layernorm\.": ".ln_2.",
    r"\.self_attn\.([qkvo])_proj\.": r".attn.w\1.",
    r"\.self_attn\.([qk])_norm\.": r".attn.\1_ln.",
    r"\.(mlp|block_sparse_moe)\.gate\.": ".block_sparse_moe.router.",
    r"\.(mlp|block_sparse_moe)\.experts\.": ".block_sparse_moe.units.",
    r"\.mlp\.shared_experts\.": ".block_sparse_moe.common.",
    r"\.mlp\.": ".ffn.",
    r"\.gate_proj\.": ".w1.",
    r"\.up_proj\.": ".w3.",
    r"\.down_proj\.": ".w2.",
}
CONFIG: dict[str, Any] = {
    "skip_tokenizer": True,
    "dtype": "float32",
    "device": "cpu",
    "context_length": 128,
    "memory": {"kv_tokens": 512},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [2, 3, 4, 5, 9, 17]


@dataclass(frozen=True)
class Case:
    """A model of the reference, and the flags of its Prism checkpoint; None: it stays as it is."""

    architecture: str
    config: dict[str, Any]
    flags: dict[str, Any] | None = None


CASES = {
    "mixtral": Case("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 4}),
    "prism": Case("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 4}, {"norm_topk": True}),
    "prism, norms and biases": Case(
        "Qwen3MoeForCausalLM",
        {**EXPERTS, **QWEN_MOE},
        {"qk_ln": True, "qkv_bias": True, "out_bias": True},
    ),
    "prism, a shared expert": Case(
        "Dots1ForCausalLM",
        {**EXPERTS, **DOTS},
        {"qk_ln": True, "expert_bias": True, "n_expert_shared": 2, "norm_topk": True},
    ),
    "prism, dense, biases of inputs": Case("Qwen2ForCausalLM", SMALL, {"qkv_bias": True}),
    "prism, dense, tied, all biases": Case(
        "LlamaForCausalLM",
        {**SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"qkv_bias": True, "out_bias": True, "ffn_bias": True, "tied": True},
    ),
}
#: cases with experts
MANY = ["mixtral", "prism", "prism, norms and biases", "prism, a shared expert"]
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module", autouse=True)
def _package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("source")
    (folder / "prism_plugin.py").write_text(DECLARATION)
    (folder / "prism_family.py").write_text(RUNTIME)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER / "glowplug-int4" / "src"))
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="module")
def plugins(_package: Path) -> PluginSet:
    return load_plugins([THREADS, *PLUGIN, "glowplug_int4.plugin"], entry_points=False)


def prism_config(reference: Reference, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a Prism checkpoint with the reference's sizes."""
    found = reference.model.config
    experts = getattr(found, "num_local_experts", 0) or getattr(found, "num_experts", 0) or 0
    return {
        "architectures": ["PrismForCausalLM"],
        "torch_dtype": "float32",
        "vocab_size": found.vocab_size,
        "n_embd": found.hidden_size,
        "n_layer": found.num_hidden_layers,
        "n_head": found.num_attention_heads,
        "n_head_kv": found.num_key_value_heads,
        "d_head": getattr(found, "head_dim", None)
        or found.hidden_size // found.num_attention_heads,
        "n_ctx": found.max_position_embeddings,
        "n_inner": found.intermediate_size,
        "n_inner_expert": getattr(found, "moe_intermediate_size", found.intermediate_size),
        "n_expert": experts,
        "n_expert_used": getattr(found, "num_experts_per_tok", 0),
        "norm_eps": found.rms_norm_eps,
        "rope_theta": found.rope_parameters["rope_theta"],
        "norm_topk": bool(getattr(found, "norm_topk_prob", False)),
        **flags,
    }


def renamed(name: str) -> str:
    for pattern, name_there in RENAMED.items():
        name = re.sub(pattern, name_there, name)
    return name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from the name of a case to its checkpoint, which is written once."""

    @cache
    def get(name: str) -> Reference:
        case, folder = CASES[name], tmp_path_factory.mktemp("model")
        reference = write(folder / "reference", case.architecture, seed=len(name), **case.config)
        if case.flags is None:
            return reference
        config, target = prism_config(reference, case.flags), folder / "prism"
        target.mkdir()
        (target / "config.json").write_text(json.dumps(config))
        tensors = {renamed(key): value for key, value in reference.tensors().items()}
        save_file(tensors, target / "model.safetensors")
        return Reference(reference.model, target)

    return get


class Family(ModelSuite):
    """The suite on the checkpoint of one case."""

    case = ""

    @pytest.fixture(autouse=True)
    def _saved(self, saved: Any, plugins: PluginSet) -> None:
        self._reference: Reference = saved(self.case)
        found = read_folder(self._reference.folder, architecture_rules(plugins.components("model")))
        assert found is not None
        self._facts = found

    def make(self, plan: Any, worker: Any) -> Any:
        from prism_family import PrismFamily  # type: ignore[import-not-found]

        return PrismFamily(None, plan, worker)

    def facts(self) -> Any:
        return self._facts

    def tensors(self) -> dict[str, Tensor]:
        return self._reference.tensors()

    def reference(self, tensors: Mapping[str, Tensor], ids: list[int]) -> Tensor:
        return self._reference.logits(ids)


class TestPrism(Family):
    case = "prism, dense, tied, all biases"


def test_the_package_imports_the_public_interface_only(_package: Path) -> None:
    assert private_modules(_package) == []


def test_the_checkpoint_has_names_of_its_own(saved: Any) -> None:
    names = {re.sub(r"\.\d+\.", ".N.", name) for name in saved("prism").tensors()}
    assert {
        "transformer.wte.weight",
        "transformer.h.N.attn.wq.weight",
        "transformer.h.N.block_sparse_moe.router.weight",
        "transformer.h.N.block_sparse_moe.units.N.w2.weight",
        "output.weight",
    } <= names
    assert not any(name.startswith(("model.", "lm_head")) for name in names)


def config_of(folder: Path, mesh: Mapping[str, int], **more: Any) -> dict[str, Any]:
    parallel = [{"use": use, "size": size} for use, size in mesh.items()]
    return {**CONFIG, "model": str(folder), "parallel": parallel, **more}


@pytest.mark.parametrize(
    "mesh",
    [
        {},
        {"tensor": 2},
        {"tensor": 2, "ep_moe": 2},
        {"tensor": 4, "ep_moe": 2},
        {"tensor": 4, "ep_moe": 2, "dp_attention": 2},
    ],
    ids=lambda mesh: "".join(f"{use}{size}" for use, size in mesh.items()) or "one",
)
@every_case
def test_ranks_hold_the_planned_bytes_and_generate_the_references_tokens(
    case: str, mesh: dict[str, int], saved: Any, plugins: PluginSet, tmp_path: Path
) -> None:
    """The plan counts the same bytes from tensor headers and from config.json alone."""
    if "ep_moe" in mesh and case not in MANY:
        return
    reference = saved(case)
    (tmp_path / "config.json").write_text((reference.folder / "config.json").read_text())
    stored = config_of(reference.folder, mesh)
    declared = config_of(tmp_path, mesh, weights={"use": "random"})
    for config in (stored, declared):
        plan = rank_plan(config, plugins)
        with RankSet(plan, plugins) as ranks:
            for rank, engine in enumerate(ranks.engines):
                compare(plan, engine, rank)
    answers = run_ranks(stored, [Submit(1, packed_ids(PROMPT), GREEDY)], plugins)
    assert answers[1].tokens == reference.greedy(PROMPT, 8)


GROUP = 8  #: inputs that share a scale of the int4 sample; it divides the columns of each rank


def in_int4(weight: Tensor) -> Tensor:
    """Return a weight as the int4 sample keeps it, in float32."""
    grouped = weight.unflatten(1, (-1, GROUP))
    scales = (grouped.abs().amax(-1, keepdim=True) / 7).half().clamp(min=1e-7).float()
    return ((grouped / scales).round().clamp(-8, 7) * scales).flatten(1)


def answers_in_int4(reference: Reference, count: int) -> list[int]:
    """Return the reference's tokens with int4 weights in attention and dense feed-forward parts."""
    model = deepcopy(reference.model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and name.endswith("_proj.weight"):
                weight.copy_(in_int4(weight))
    return Reference(model, reference.folder).greedy(PROMPT, count)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", ["prism, norms and biases", "prism, dense, biases of inputs"])
def test_a_scheme_quantises_the_right_weights_whatever_their_names(
    case: str, ranks: int, saved: Any, plugins: PluginSet
) -> None:
    """Embedding, head, router, norms, biases and experts stay as they are."""
    reference = saved(case)
    mesh = {"tensor": ranks, **({"ep_moe": ranks} if case in MANY else {})} if ranks > 1 else {}
    scheme = {"use": "int4_groups", "group": GROUP}
    config = config_of(reference.folder, mesh, quantization=scheme)
    plan = rank_plan(config, plugins)
    with RankSet(plan, plugins) as started:
        for rank, engine in enumerate(started.engines):
            compare(plan, engine, rank)
            model: Any = engine.runner.model
            linears = [model.head.linear, model.layers[0].attention.qkv]
            kinds = [[type(method).__name__ for method in linear.methods] for linear in linears]
            assert kinds == [["DenseLinear"], ["Int4Linear"]]
    answers = run_ranks(config, [Submit(1, packed_ids(PROMPT), GREEDY)], plugins)
    assert answers[1].tokens == answers_in_int4(reference, 8) != reference.greedy(PROMPT, 8)
