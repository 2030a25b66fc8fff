"""``glowplug export-nextn`` writes the same bytes under other names, completely or not at all, into
a folder that works as a draft.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from glowplug.core.errors import WeightError
from glowplug.core.facts.model_folder import embedded_path, read_folder
from glowplug.core.facts.safetensors_header import read_header
from glowplug.core.testing.harness.fakes import TINY_V3, write_model
from glowplug.entrypoints.checkpoints.nextn_export import draft_config, renamed
from glowplug.entrypoints.cli.main import main
from tests.support.reading import built_in

EMBEDDED = embedded_path()
LAYERS = 5


def raw_tensors(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return (dtype, shape, bytes) of every tensor, read without our own code."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return {
        name: (entry["dtype"], entry["shape"], data[8 + length :][slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def export(model: Path | str, output: Path, *more: str) -> int:
    return main(["export-nextn", "--model", str(model), "--output", str(output), *more])


def test_tensors_are_exported_byte_for_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "draft"
    assert export("embedded", out) == 0
    assert f"--speculative-draft-model-path {out}" in capsys.readouterr().out
    exported, whole = (
        raw_tensors(out / "model.safetensors"),
        raw_tensors(EMBEDDED / "model.safetensors"),
    )
    wanted = {
        name.replace(f"model.layers.{LAYERS}.", "model.layers.0."): value
        for name, value in whole.items()
        if name.startswith(f"model.layers.{LAYERS}.")
    }
    assert exported == wanted and len(exported) > 50
    assert {name: fact.shape for name, fact in read_header(out / "model.safetensors").items()} == {
        name: tuple(value[1]) for name, value in wanted.items()
    }
    with safe_open(
        out / "model.safetensors", framework="pt"
    ) as file:  # the reference reader accepts it
        assert set(file.keys()) == set(wanted)


def test_config_and_tokenizer(tmp_path: Path) -> None:
    assert export(EMBEDDED, tmp_path / "draft") == 0
    before, after = (
        json.loads((folder / "config.json").read_text())
        for folder in (EMBEDDED, tmp_path / "draft")
    )
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    assert changed == {
        "architectures": ["DeepseekV3ForCausalLMNextN"],
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
    }
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "draft" / name).read_bytes() == (EMBEDDED / name).read_bytes()
    rules = built_in().rules
    facts, target = read_folder(tmp_path / "draft", rules), read_folder(EMBEDDED, rules)
    assert facts is not None and target is not None
    assert (facts.num_layers, facts.nextn_layers, facts.quant_block) == (0, 1, target.quant_block)


def test_modules_left_unquantised_keep_their_meaning() -> None:
    named = ["lm_head", "model.layers.61.eh_proj", "model.layers.0.mlp", "model.layers.6.mlp"]
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": named},
    }
    own = draft_config(config, 61)
    assert own["quantization_config"] == {
        "quant_method": "fp8",
        "modules_to_not_convert": ["lm_head", "model.layers.0.eh_proj"],
    }
    assert config["quantization_config"]["modules_to_not_convert"] == named  # type: ignore[index]
    assert (
        renamed("model.layers.61.mlp.experts.61.up_proj.bias", 61)
        == "model.layers.0.mlp.experts.61.up_proj.bias"
    )


def test_the_first_layer_of_several_from_several_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", {**TINY_V3, "num_nextn_predict_layers": 2})
    parts: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
        "a.safetensors": {
            "model.layers.3.enorm.weight": ("BF16", (8,)),
            "model.norm.weight": ("F32", (4,)),
        },
        "b.safetensors": {
            "model.layers.3.eh_proj.weight": ("F8_E4M3", (8, 16)),
            "model.layers.4.enorm.weight": ("BF16", (8,)),
        },
    }
    rng = os.urandom
    for name, tensors in parts.items():
        write_model(folder, {**TINY_V3, "num_nextn_predict_layers": 2}, tensors)
        data = (folder / "model.safetensors").read_bytes()
        length = 8 + int.from_bytes(data[:8], "little")
        (folder / name).write_bytes(data[:length] + rng(len(data) - length))
        (folder / "model.safetensors").unlink()
    assert export(folder, tmp_path / "draft") == 0
    whole = {**raw_tensors(folder / "a.safetensors"), **raw_tensors(folder / "b.safetensors")}
    assert raw_tensors(tmp_path / "draft" / "model.safetensors") == {
        "model.layers.0.enorm.weight": whole["model.layers.3.enorm.weight"],
        "model.layers.0.eh_proj.weight": whole["model.layers.3.eh_proj.weight"],
    }


# ---- refusals ------------------------------------------------------------------------------------


def test_a_checkpoint_without_a_layer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(
        tmp_path / "model", {**TINY_V3, "num_nextn_predict_layers": 1}, {"x": ("F32", (1,))}
    )
    assert export(folder, tmp_path / "draft") == 2
    said = capsys.readouterr().err
    assert (
        "holds no next-token layer after its 3 layers" in said
        and "fix:" in said
        and "states 1" in said
    )
    assert not (tmp_path / "draft").exists()


def test_existing_files_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "draft"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    assert export(EMBEDDED, out) == 2 and "not empty" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    assert export(EMBEDDED, out, "--force") == 0
    assert not (out / "mine.txt").exists() and (out / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["draft"], "nothing temporary is left"
    (tmp_path / "file").write_text("")
    assert export(EMBEDDED, tmp_path / "file", "--force") == 2
    (tmp_path / "empty").mkdir()
    assert export(EMBEDDED, tmp_path / "empty") == 0


@pytest.mark.parametrize("where", [".", "model", "link"])
def test_the_checkpoint_is_never_replaced(tmp_path: Path, where: str) -> None:
    folder = write_model(
        tmp_path / "model",
        {**TINY_V3, "num_nextn_predict_layers": 1},
        {"model.layers.3.enorm.weight": ("F32", (4,))},
    )
    (tmp_path / "link").symlink_to(folder)
    assert export(folder, tmp_path / where, "--force") == 2
    assert (folder / "model.safetensors").exists() and (folder / "config.json").exists()


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from glowplug.entrypoints.checkpoints import nextn_export

    out = tmp_path / "draft"
    out.mkdir()
    (out / "old").write_text("kept")

    def broken(*_: Any) -> Any:
        raise WeightError("the disk went away")

    monkeypatch.setattr(nextn_export, "_pieces", broken)
    assert export(EMBEDDED, out, "--force") == 2
    assert [path.name for path in out.iterdir()] == ["old"] and [
        path.name for path in tmp_path.iterdir()
    ] == ["draft"]


@pytest.mark.parametrize("model", ["/no/such/folder", "draft"])
def test_models_that_cannot_be_exported_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    if model == "draft":
        assert export(EMBEDDED, tmp_path / "draft") == 0
        model = str(tmp_path / "draft")
    assert export(model, tmp_path / "again") == 2
    assert "fix:" in capsys.readouterr().err


# ---- the folder drafts ---------------------------------------------------------------------------


def test_an_exported_layer_drafts_as_the_checkpoints_own(tmp_path: Path) -> None:
    """The tokens are the same, and so is the number of accepted drafts."""
    from glowplug.core.testing.harness.ranks import RankSet, rank_plan, submit

    assert export("embedded", tmp_path / "draft") == 0
    found = []
    for options in ({}, {"draft_model": str(tmp_path / "draft")}):
        config = {
            "model": "embedded",
            "device": "cpu",
            "dtype": "float32",
            "memory": {"kv_tokens": 512},
            "context_length": 96,
            "scheduler": {"max_running_requests": 4, "chunk_size": 32},
            "speculative": {"use": "nextn", "adaptive": False, "steps": 2, **options},
        }
        with RankSet(rank_plan(config)) as ranks:
            collected = ranks.run([submit(1, range(5, 25), 40), submit(2, [7, 8, 9, 10], 40)])
            tokens = {id: one.tokens for id, one in collected.items()}
            found.append((tokens, {id: one.counts for id, one in collected.items()}))
    assert found[0] == found[1]
    assert all(len(counts) > 1 for counts in found[0][1].values())
