"""Configurations that cannot run: each is refused with field, reason and fix, all reasons at once,
nothing loaded.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import ConfigError, PlanRefused, Refusal
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plugin.component import Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.loading import PluginSource
from glowplug.core.plugin.offers import (
    AttentionOffers,
    Capture,
    CollectiveOffers,
    ExecutorOffers,
    GraphOffers,
    Mode,
    ParallelOffers,
    QuantizationOffers,
    SamplerOffers,
    SpeculativeOffers,
)
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.plugin.speculative_options import SpeculativeOptions
from glowplug.core.testing.harness.fakes import TINY_V3, component, write_model
from glowplug.plugins.built_in import DEFAULT_PLUGINS


def with_components(**by_slot: list[Component]) -> PluginSet:
    """Return the built-ins and one plugin that registers these components, slot by slot."""
    from glowplug.core.plugin.slots import BY_NAME

    holder = type(
        "Extra",
        (),
        {
            BY_NAME[slot].hook: hookimpl(lambda self, made=made: made, specname=BY_NAME[slot].hook)
            for slot, made in by_slot.items()
        },
    )
    for slot in by_slot:  # pluggy reads the names of arguments without defaults
        getattr(holder, BY_NAME[slot].hook).__defaults__ = (by_slot[slot],)
    sources = [PluginSource(name, name) for name in DEFAULT_PLUGINS]
    return PluginSet([*sources, PluginSource("extra", "", "extra-dist", "2.1", loaded=holder())])


MLA = frozenset({"mla"})


class WideOptions(SpeculativeOptions):
    steps: int = 3

    def width(self) -> int:
        return 1 + self.steps


def drafter(**offers: Any) -> Component:
    base = component("speculative", "drafter", SpeculativeOffers(drafts=True, **offers))
    options = type("DrafterOptions", (base.options, WideOptions), {"__module__": __name__})
    return dataclasses.replace(base, options=options)


# ---- facts and values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "field", "reason", "fix"),
    [
        ({"device": "cuda"}, "device", "no CUDA device", "cpu"),
        ({"attention": {"use": "torch_mha"}}, "attention.use", "needs mla", "torch_mla"),
        (
            {"attention": {"kv_dtype": "fp8_e5m2"}},
            "attention.kv_dtype",
            "fp8_e5m2",
            'attention.kv_dtype = "auto"',
        ),
        (
            {"attention": {"use": "torch_mla", "kv_dtype": "fp8_e4m3"}},
            "attention.kv_dtype",
            "fp8_e4m3",
            "auto",
        ),
        (
            {"weights": {"use": "safetensors"}},
            "weights.use",
            "holds no weights",
            'a folder with weights (safetensors), or weights.use = "random" for made-up ones',
        ),
        (
            {"weights": {}},
            "weights.use",
            "must be requested",
            'a folder with weights (safetensors), or weights.use = "random" for made-up ones',
        ),
        ({"context_length": 5000}, "context_length", "4096 positions", "4096"),
        (
            {"context_length": 1000, "memory": {"kv_tokens": 600}},
            "context_length",
            "KiB",
            "context_length = ",
        ),
        ({"memory": {"kv_tokens": 10**12}}, "memory.kv_tokens", "GiB", "memory.kv_tokens = "),
        ({"memory": {"kv_bytes": 5}}, "memory.kv_bytes", "two pages", "memory.kv_bytes = "),
        ({"scheduler": {"chunk_size": 10**9}}, "scheduler.chunk_size", "activations", "smaller"),
        (
            {"policy": {"use": "longest_prefix"}, "cache": {"use": "none"}},
            "policy.use",
            "caches none",
            "radix",
        ),
        (
            {"parallel": [{"use": "single"}, {"use": "single"}]},
            "parallel.0.use",
            "both define",
            "keep one",
        ),
        ({"model": "/no/such/folder"}, "model", "no folder or file", "embedded"),
        (
            {"model": "some/unseen"},
            "model",
            "no folder or file",
            "glowplug download some/unseen",
        ),
    ],
)
def test_refused_with_field_reason_and_fix(refused, config, field, reason, fix) -> None:
    found = refused(config)
    assert list(found) == [field], found
    assert reason in found[field].reason and fix in found[field].fix, found[field]


def test_every_reason_at_once(refused) -> None:
    found = refused(
        {
            "device": "cuda",
            "attention": {"use": "torch_mha"},
            "weights": {"use": "safetensors"},
            "scheduler": {"overlapp": True},
            "server": {"port": "30000"},
        }
    )
    assert set(found) == {
        "device",
        "attention.use",
        "weights.use",
        "scheduler.overlapp",
        "server.port",
    }


def test_an_unknown_architecture_is_refused(refused, tmp_path: Path) -> None:
    folder = write_model(tmp_path, {**TINY_V3, "architectures": ["MambaForCausalLM"]})
    found = refused({"model": str(folder)})
    assert (
        "MambaForCausalLM" in found["model"].reason
        and "DeepseekV3ForCausalLM" in found["model"].reason
    )


@pytest.mark.parametrize("name", ["fp4", "int8"])
def test_stacking_on_a_quantized_checkpoint(refused, v3_fp8: Path, name: str) -> None:
    found = refused({"model": str(v3_fp8), "quantization": {"use": name}})["quantization.use"]
    assert "already quantized (fp8 in 128x128 blocks)" in found.reason
    assert "leave quantization out" in found.fix and "block_fp8" in found.fix


def test_no_scheme_on_a_quantized_checkpoint(refused, v3_fp8: Path) -> None:
    found = refused({"model": str(v3_fp8), "quantization": {"use": "none"}})["quantization.use"]
    assert found.reason == "none reads unquantized checkpoints, this one is fp8 in 128x128 blocks"
    assert 'quantization.use = "block_fp8"' in found.fix


def test_a_registered_scheme_is_not_stacked_either(refused, v3_fp8: Path) -> None:
    own = with_components(
        quantization=[
            component(
                "quantization",
                "online8",
                QuantizationOffers(reads=frozenset({"none", "int8"}), online=True),
            )
        ]
    )
    found = refused({"model": str(v3_fp8), "quantization": {"use": "online8"}}, plugins=own)[
        "quantization.use"
    ]
    assert "already quantized (fp8 in 128x128 blocks); online8 would quantize it" in found.reason


def test_an_unknown_scheme_on_a_plain_checkpoint_names_the_known_ones(refused) -> None:
    found = refused({"quantization": {"use": "blockfp8"}})["quantization.use"]
    assert "already quantized" not in found.reason and "block_fp8" in found.fix


def test_other_blocks_than_the_scheme_reads(refused, tmp_path: Path) -> None:
    quant = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    folder = write_model(tmp_path, {**TINY_V3, "quantization_config": quant})
    found = refused({"model": str(folder), "quantization": {"use": "block_fp8"}})[
        "quantization.use"
    ]
    assert "128x128" in found.reason and "64x64" in found.reason


def test_a_model_too_big_names_both_numbers(refused, tmp_path: Path) -> None:
    big = {
        **TINY_V3,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "n_routed_experts": 256,
        "vocab_size": 129280,
        "moe_intermediate_size": 2048,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "num_attention_heads": 128,
    }
    found = refused({"model": str(write_model(tmp_path, big))})["model"]
    assert "TiB" in found.reason and "22.4 GiB (70% of the machine's 32.0 GiB)" in found.reason
    assert 'dtype = "bfloat16"' in found.fix


# ---- capabilities --------------------------------------------------------------------------------


def test_compute_capability(refused) -> None:
    own = with_components(
        attention=[
            component(
                "attention",
                "sm100",
                AttentionOffers(kinds=MLA, compute=frozenset({100}), devices=frozenset({"cuda"})),
            )
        ]
    )
    found = refused({"attention": {"use": "sm100"}}, plugins=own, hardware=read_sheet("8xh200"))[
        "attention.use"
    ]
    assert "SM100" in found.reason and "SM90" in found.reason and found.origin == "extra-dist 2.1"
    assert "torch_mla" in found.fix
    assert (
        "runs on cuda, the device is cpu"
        in refused({"attention": {"use": "sm100"}}, plugins=own)["attention.use"].reason
    )


def test_page_sizes(refused, planned) -> None:
    own = with_components(
        attention=[
            component(
                "attention", "paged", AttentionOffers(kinds=MLA, page_sizes=frozenset({32, 128}))
            )
        ]
    )
    found = refused({"attention": {"use": "paged", "page_size": 16}}, plugins=own)[
        "attention.page_size"
    ]
    assert "32, 128" in found.reason and found.fix == "attention.page_size = 32"
    assert planned({"attention": {"use": "paged"}}, plugins=own).sizes.page_size == 32


def test_dtypes(refused) -> None:
    own = with_components(
        sampling=[component("sampling", "halves", SamplerOffers(dtypes=frozenset({"float16"})))]
    )
    found = refused({"sampling": {"use": "halves"}, "dtype": "bfloat16"}, plugins=own)["dtype"]
    assert "float16" in found.reason and found.fix == 'dtype = "float16"'


def test_width_and_trees(refused, planned) -> None:
    narrow = component("attention", "narrow", AttentionOffers(kinds=MLA, max_width=2))
    own = with_components(attention=[narrow], speculative=[drafter()])
    found = refused(
        {"attention": {"use": "narrow"}, "speculative": {"use": "drafter"}}, plugins=own
    )["attention.use"]
    assert "supports 2 query tokens" in found.reason and "computes 4" in found.reason
    fits = planned(
        {"attention": {"use": "narrow"}, "speculative": {"use": "drafter", "steps": 1}}, plugins=own
    )
    assert (
        fits.sizes.width == 2
        and fits.sizes.max_step_tokens == fits.sizes.chunk_size + 2 * fits.sizes.max_running
    )
    chains = component("attention", "chains", AttentionOffers(kinds=MLA))
    trees = with_components(attention=[chains], speculative=[drafter(tree=True)])
    given = {"attention": {"use": "chains"}, "speculative": {"use": "drafter"}}
    found = refused(given, plugins=trees)["attention.use"]
    assert "tree" in found.reason and "torch_mla" in found.fix
    assert planned({"speculative": {"use": "drafter"}}, plugins=trees).sizes.width == 4


def test_modes_on_the_steps_path(refused) -> None:
    modes = {Mode.PREFILL: Capture.GRAPH, Mode.DECODE: Capture.GRAPH}
    own = with_components(
        attention=[component("attention", "plain", AttentionOffers(kinds=MLA, modes=modes))],
        speculative=[drafter()],
    )
    found = refused(
        {"attention": {"use": "plain"}, "speculative": {"use": "drafter"}}, plugins=own
    )["attention.use"]
    assert "verify" in found.reason and "torch_mla" in found.fix


def test_graph_capture_needs_every_component(refused, planned) -> None:
    runner = component("graphs", "recorder", GraphOffers(captures=frozenset({Mode.DECODE})))
    own = with_components(graphs=[runner])
    asked = {"graphs": {"use": "recorder"}, "attention": {"use": "torch_mla"}}
    found = refused(asked, plugins=own, hardware=read_sheet("1xh200"))
    assert set(found) == {"graphs.use"}
    assert "torch_mla syncs with the host or allocates in decode" in found["graphs.use"].reason
    assert "eager" in found["graphs.use"].fix
    assert planned(plugins=own).choice("graphs").name == "eager"


def test_overlap_is_turned_off_with_a_remark_or_refused(refused, planned) -> None:
    own = with_components(sampling=[component("sampling", "waits", SamplerOffers(overlap=False))])
    for sheet, by in (("1xh200", "waits"), ("cpu", "auto")):
        plan = planned({"sampling": {"use": "waits"}}, plugins=own, hardware=read_sheet(sheet))
        assert not plan.overlap
        assert [(d.value, d.by) for d in plan.decisions if d.field == "scheduler.overlap"] == [
            (False, by)
        ]
    assert (
        planned(hardware=read_sheet("1xh200")).overlap
        and not planned(hardware=read_sheet("cpu")).overlap
    )
    found = refused({"sampling": {"use": "waits"}, "scheduler": {"overlap": True}}, plugins=own)
    assert "waits for the device" in found["scheduler.overlap"].reason


def test_next_token_layers(refused) -> None:
    own = with_components(speculative=[drafter(nextn_layer=True)])
    found = refused({"speculative": {"use": "drafter"}}, plugins=own)["speculative.use"]
    assert "has none" in found.reason and found.fix.startswith('speculative.use = "none"')


def test_ranks(refused, planned) -> None:
    tensor = component("parallel", "split", ParallelOffers(axes=frozenset({"tp"}), ranks=True))
    links = component("collectives", "links", CollectiveOffers(ranks=True))
    far = component("executor", "far", ExecutorOffers(ranks=True, hosts=True))
    own = with_components(parallel=[tensor], collectives=[links], executor=[far])

    def config(size: int, executor: str) -> dict[str, Any]:
        return {"parallel": [{"use": "split", "size": size}], "executor": {"use": executor}}

    hosts = read_sheet("2x8xh200")
    plan = planned(config(8, "multiprocess"), plugins=own, hardware=hosts)
    assert (
        plan.mesh == {"tp": 8}
        and plan.ranks == 8
        and plan.choice("collectives").name == "peer_memory"
    )
    assert "local connects one rank" in next(
        d.why for d in plan.decisions if d.field == "collectives.use"
    )
    assert planned(config(16, "far"), plugins=own, hardware=hosts).ranks == 16
    assert (
        "one host"
        in refused(config(16, "multiprocess"), plugins=own, hardware=hosts)["executor.use"].reason
    )
    assert (
        "runs one rank"
        in refused(config(2, "inline"), plugins=own, hardware=hosts)["executor.use"].reason
    )
    found = refused(config(16, "far"), plugins=own, hardware=read_sheet("8xh200"))[
        "parallel.0.size"
    ]
    assert "has 8" in found.reason and found.fix == "parallel.0.size = 8"


# ---- availability and own checks -----------------------------------------------------------------


def test_missing_packages_and_foreign_contracts(refused, planned) -> None:
    offers = AttentionOffers(kinds=MLA)
    own = with_components(
        attention=[
            component("attention", "needy", offers, requires=(Package("no-such-package", ">=2"),)),
            component("attention", "newer", offers, requires=(Package("pluggy", ">=999"),)),
            component("attention", "foreign", offers, contract=99),
        ]
    )
    found = refused({"attention": {"use": "needy"}}, plugins=own)["attention.use"]
    assert "no-such-package>=2 (not installed)" in found.reason and "pip install" in found.fix
    assert (
        "pluggy>=999 (1."
        in refused({"attention": {"use": "newer"}}, plugins=own)["attention.use"].reason
    )
    found = refused({"attention": {"use": "foreign"}}, plugins=own)["attention.use"]
    assert "contract 99" in found.reason and "extra-dist 2.1" in found.fix
    assert planned(plugins=own).choice("attention").name == "torch_mla"


def test_own_checks_see_the_combination_and_name_their_distribution(refused, planned) -> None:
    def check(context: Any) -> list[Refusal]:
        if context.values.dtype == "float16" and not context.chosen["cache"][0].offers.shares:
            return [
                Refusal("picky", "dtype", "float16 without a prefix cache", 'dtype = "float32"')
            ]
        return []

    def broken(context: Any) -> list[Refusal]:
        raise KeyError("oops")

    offers = AttentionOffers(kinds=MLA)
    own = with_components(
        attention=[
            component("attention", "picky", offers, check=check),
            component("attention", "broken", offers, check=broken),
        ]
    )
    base = {"attention": {"use": "picky"}, "cache": {"use": "none"}}
    assert planned(base, plugins=own).dtype == "float32"
    assert refused({**base, "dtype": "float16"}, plugins=own)["dtype"].origin == "extra-dist 2.1"
    found = refused({"attention": {"use": "broken"}}, plugins=own)["attention"]
    assert "KeyError" in found.reason and "extra-dist 2.1" in found.fix


def test_check_plan_hook(planned, refused) -> None:
    class Judge:
        @hookimpl
        def check_plan(self, context: Any) -> list[Refusal]:
            return (
                [Refusal("judge", "seed", "the seed is odd", "an even seed")]
                if context.config.seed % 2
                else []
            )

    sources = [PluginSource(name, name) for name in DEFAULT_PLUGINS]
    own = PluginSet([*sources, PluginSource("judge", "", "judge", "1", loaded=Judge())])
    assert planned({"seed": 2}, plugins=own).seed == 2
    assert refused({"seed": 3}, plugins=own)["seed"].by == "judge"


def test_a_candidate_that_narrows_a_common_option_is_passed_over(planned, refused) -> None:
    from typing import Literal

    narrow = component(
        "attention",
        "narrow",
        AttentionOffers(kinds=MLA),
        {"kv_dtype": (Literal["float16"], "float16")},
    )
    own = with_components(attention=[narrow])
    assert (
        planned({"attention": {"kv_dtype": "bfloat16"}}, plugins=own).choice("attention").name
        == "torch_mla"
    )
    found = refused({"attention": {"kv_dtype": "fp8_e5m2"}}, plugins=own)["attention.kv_dtype"]
    assert "narrow does not accept 'fp8_e5m2'" in found.reason and found.fix


def test_no_candidate_fits(refused) -> None:
    """Every candidate is refused for its own reason; the refusal of the choice names all of
    them.
    """
    found = refused({"weights": {}})
    reason = found["weights.use"].reason
    assert "safetensors reads safetensors" in reason and "must be requested" in reason


def test_parse_errors_are_config_errors_and_the_rest_are_not(planned) -> None:
    with pytest.raises(ConfigError):
        planned({"nonsense": 1})
    with pytest.raises(PlanRefused) as caught:
        planned({"device": "cuda"})
    assert not isinstance(caught.value, ConfigError)
