"""``glowplug check --numeric``: a correct engine passes, a planted fault is found in its layer."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from glowplug.core.layers.decoder import DecoderLayer
from glowplug.core.plugin.registry import load_plugins
from glowplug.entrypoints.cli.main import main
from glowplug.entrypoints.numeric.measure import NumericReport, measure
from glowplug.entrypoints.numeric.reference import Reference, reference_plan
from tests.support.tiny import write_config

FAULTY = ("tests.plugins.faulty",)


def report(folder: Path, name: str, **config: Any) -> NumericReport:
    plugins = load_plugins(FAULTY)
    return measure(
        {
            "model": str(write_config(folder, name)),
            "plugins": FAULTY,
            "weights": {"use": "random"},
            "skip_tokenizer": True,
            "device": "cpu",
            "scheduler": {"max_running_requests": 4},
            "memory": {"kv_tokens": 512},
            **config,
        },
        plugins,
    )


CORRECT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, float32": ("llama", {"dtype": "float32"}),
    "llama, bfloat16": ("llama", {"dtype": "bfloat16"}),
    "v2, float32": ("v2", {"dtype": "float32"}),
    "v3, bfloat16": ("v3", {"dtype": "bfloat16"}),
    "v3, few rows a step": (
        "v3",
        {"dtype": "float32", "scheduler": {"max_running_requests": 2, "chunk_size": 32}},
    ),
    "v3, block FP8": ("v3_fp8", {"dtype": "float32"}),
    "v3, block FP8, rounded activations": (
        "v3_fp8",
        {"dtype": "bfloat16", "quantization": {"use": "block_fp8", "activations": "dynamic"}},
    ),
}


@pytest.mark.parametrize("case", CORRECT)
def test_a_correct_engine_passes(case: str, tmp_path: Path) -> None:
    name, config = CORRECT[case]
    found = report(tmp_path, name, **config)
    assert found.failures == () and found.first is None
    assert [part.part for part in found.parts] == [
        "embeddings",
        "layer 0",
        "layer 1",
        "layer 2",
        "head",
    ]
    if config["dtype"] != "float32":
        assert all(part.prefill > 1e-4 for part in found.parts[1:-1]), "nothing was compared"
        assert max(part.ratio for part in found.parts) < 0.8, "a tolerance without margin"


FAULTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama, wrong scale": (
        "llama",
        1,
        {"dtype": "bfloat16", "quantization": {"module": "model.layers.1.self_attn.o_proj"}},
    ),
    "llama, transposed weight": (
        "llama",
        2,
        {
            "dtype": "float32",
            "quantization": {"module": "model.layers.2.self_attn.o_proj", "fault": "transpose"},
        },
    ),
    "v3, wrong scale of an MLP": (
        "v3",
        0,
        {"dtype": "bfloat16", "quantization": {"module": "model.layers.0.mlp.down_proj"}},
    ),
    "v3, wrong scale behind other layers": (
        "v3",
        2,
        {"dtype": "bfloat16", "quantization": {"module": "model.layers.2.self_attn.o_proj"}},
    ),
    "v3, block FP8, wrong scale": (
        "v3_fp8",
        1,
        {
            "dtype": "bfloat16",
            "quantization": {"module": "model.layers.1.self_attn.o_proj", "activations": "dynamic"},
        },
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_planted_fault_is_reported_as_its_layer(case: str, tmp_path: Path) -> None:
    name, layer, config = FAULTS[case]
    quantization = {"use": "faulty_weight", **config["quantization"]}
    found = report(tmp_path, name, **{**config, "quantization": quantization})
    assert found.first is not None and found.first.part == f"layer {layer}"
    assert [part.part for part in found.parts if not part.passes] == [f"layer {layer}"], (
        "the error of a layer is its own: later layers read the engine's stream"
    )
    assert found.failures[0] == f"layer {layer} is the first that differs"


def test_a_fault_of_decode_steps_alone_is_found(tmp_path: Path) -> None:
    attention = {"use": "faulty_decode", "layer": 1}
    found = report(tmp_path, "v3", dtype="float32", attention=attention)
    assert found.first is not None and found.first.part == "layer 1"
    assert found.first.prefill < found.tolerance.layer < found.first.decode


def test_the_reference_holds_one_layer_at_a_time(tmp_path: Path) -> None:
    """The weights of a layer are free when those of the next one are loaded."""
    plugins = load_plugins()
    config = {"model": str(write_config(tmp_path, "v3")), "weights": {"use": "random"}}
    ids = torch.arange(12).view(2, 6).int().numpy()
    with Reference(reference_plan(config, plugins), plugins, ids) as reference:
        model = reference._model
        layers: list[weakref.ref[DecoderLayer]] = [weakref.ref(one) for one in model.layers]
        streams = torch.randn(2, 6, 4, 64)
        for step in reference.layers(streams):
            gc.collect()
            alive = [number for number, one in enumerate(layers) if one() is not None]
            assert alive[0] == step.layer, "an earlier layer's weights are still in memory"


def test_the_command_exits_with_1_and_names_the_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", "--numeric", "--model", str(write_config(tmp_path, "llama"))]
    words += ["--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--port", "4000"]
    words += ["--skip-tokenizer-init", "--set", "memory.kv_tokens=512"]
    assert main(words) == 0
    assert "passed" in capsys.readouterr().out
    faulty = ["--plugin", "tests.plugins.faulty", "--set", "quantization.use=faulty_weight"]
    faulty += ["--set", "quantization.module=model.layers.1.self_attn.o_proj", "--json"]
    assert main(words + faulty) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["first_difference"] == "layer 1" and not found["passed"]
    assert [part["part"] for part in found["parts"]][0] == "embeddings"


def test_prompts_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "What is 17 + 25?"}\n{"prompt": "Say: seven"}\n')
    words = ["check", "--numeric", "--device", "cpu", "--numeric-prompts", str(file)]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("2 sequences of ")
    file.write_text('{"prompt": "What is 17 + 25?"}\n{"text": "Say: seven"}\n')
    assert main(words) == 2
    assert f'{file}:2: "prompt" is missing' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--facts", "cpu"], "the engine runs on this machine"),
        (["--block-plugin", "glowplug.plugins.speculative.ngram"], "load every plugin"),
        (["--tp", "2", "--dp-size", "2", "--enable-dp-attention"], "form 2 groups"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--numeric", "--device", "cpu", *flags]) == 2
    said = capsys.readouterr().err
    assert reason in said and "fix:" in said


def test_ranks_are_compared_as_one_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--numeric", "--device", "cpu", "--tp", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]


@pytest.mark.gpu
def test_the_default_engine_passes_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels for the GPU, graphs and FP8 GEMMs against the reference on the CPU."""
    assert main(["check", "--numeric", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert max(part["ratio"] for part in found["parts"]) < 1
