"""``glowplug checkpoint random`` writes complete folders with published names and sizes, which can
be served.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.facts.safetensors_header import read_tensors
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.entrypoints.checkpoints import random as checkpoint, writer as checkpoint_writer


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins(entry_points=False)


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    checkpoint.configure(parser)
    return checkpoint.run(parser.parse_args(["random", *words]))


@pytest.mark.parametrize(
    ("shape", "tensors", "parameters"),
    [("deepseek-v2-lite", 5291, 15_706_484_224), ("deepseek-v3", 91991, 684_489_845_504)],
)
def test_named_shapes_have_the_published_tensors(
    plugins: PluginSet, shape: str, tensors: int, parameters: int
) -> None:
    """Counts are those of the published checkpoints' index files, their NextN layer and FP8 scales
    included.
    """
    config: dict[str, Any] = json.loads(checkpoint.shapes()[shape].read_text())
    targets = list(
        checkpoint_writer.weight_targets(checkpoint_writer._plan(config, 0, plugins), plugins)
    )
    assert len(targets) == len({target.name for target in targets}) == tensors
    weights = [target for target in targets if not target.name.endswith("_scale_inv")]
    assert sum(math.prod(target.shape) for target in weights) == parameters


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("tiny-v2", ()),
        ("tiny-v3", ("--shard-mb", "1")),
        ("tiny-v3", ("--quantization", "fp8")),
        ("tiny-llama", ("--dtype", "bfloat16")),
    ],
)
def test_a_written_checkpoint_serves_as_the_synthetic_source_does(
    tmp_path: Path, shape: str, words: tuple[str, ...]
) -> None:
    out, bare = tmp_path / "written", tmp_path / "bare"
    assert command(str(out), "--shape", shape, "--seed", "3", *words) == 0
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert (len(files) > 1) == ("--shard-mb" in words) and read_tensors(out)
    bare.mkdir()
    (bare / "config.json").write_text((out / "config.json").read_text())
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(model=str(out), dtype="float32") as llm:
        said = llm.chat([{"role": "user", "content": "Hello"}], greedy)[0]
        text = llm.generate(["Hello"], greedy)[0]
    assert len(said.token_ids) == 8
    with LLM(
        model=str(bare), dtype="float32", skip_tokenizer=True, weights={"use": "random", "seed": 3}
    ) as llm:
        assert llm.generate([text.prompt_token_ids], greedy)[0].token_ids == text.token_ids


def test_options_reach_the_config(tmp_path: Path) -> None:
    assert (
        command(
            str(tmp_path / "a"),
            "--shape",
            "tiny-v3",
            "--dtype",
            "bfloat16",
            "--layers",
            "2",
            "--quantization",
            "fp8",
            "--tokenizer",
            "none",
        )
        == 0
    )
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["torch_dtype"], config["num_hidden_layers"]) == ("bfloat16", 2)
    tensors = read_tensors(tmp_path / "a")
    assert tensors["model.layers.1.self_attn.o_proj.weight"].dtype == "float8_e4m3fn"
    assert tensors["model.layers.1.self_attn.o_proj.weight_scale_inv"].dtype == "float32"
    assert tensors["model.embed_tokens.weight"].dtype == "bfloat16"
    assert (
        "model.layers.2.eh_proj.weight" in tensors
        and not (tmp_path / "a" / "tokenizer.json").exists()
    )
    assert (
        command(
            str(tmp_path / "b"),
            "--config",
            str(tmp_path / "a"),
            "--quantization",
            "none",
            "--tokenizer",
            "none",
        )
        == 0
    )
    assert {fact.dtype for fact in read_tensors(tmp_path / "b").values()} == {"bfloat16", "float32"}


def test_a_tokenizer_can_be_copied(tmp_path: Path) -> None:
    assert command(str(tmp_path / "a"), "--shape", "tiny-llama") == 0
    assert (
        command(str(tmp_path / "b"), "--shape", "tiny-llama", "--tokenizer", str(tmp_path / "a"))
        == 0
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--shape", "tiny-llama", "--layers", "0"), "--layers must be at least 1"),
        (("--shape", "tiny-llama", "--tokenizer", "/nowhere"), "holds no tokenizer.json"),
        (("--config", "/nowhere/config.json"), "No such file"),
        (("--shape", "deepseek-v3"), "bytes are needed"),
    ],
)
def test_checkpoints_that_cannot_be_written_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str
) -> None:
    assert command(str(tmp_path / "out"), *words) == 2
    assert reason in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    assert command(str(tmp_path / "full"), "--shape", "tiny-llama") == 2
    assert "not an empty folder" in capsys.readouterr().err
