"""Damaged model folders are refused in a sentence that names the file, before anything is
loaded.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glowplug import LLM
from glowplug.core.errors import PlanRefused
from glowplug.entrypoints.cli.main import main
from tests.e2e.fake_engine import TEMPLATE, VOCAB, make_tokenizer
from tests.support.tiny import write_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = write_config(tmp_path / "model", "v3", vocab_size=VOCAB)
    make_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer.json", "{}", "tokenizer.json: Model missing"),
        ("tokenizer.json", "\x00", "tokenizer.json: "),
        ("generation_config.json", "{,", "generation_config.json: "),
        ("generation_config.json", "[1]", "generation_config.json: not a JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id is 'x'"),
        ("generation_config.json", '{"eos_token_id": [1, true]}', "eos_token_id is"),
        ("generation_config.json", '{"eos_token_id": -1}', "eos_token_id is -1"),
        ("special_tokens_map.json", "[]", "special_tokens_map.json"),
    ],
)
def test_tokenizer_files(folder: Path, name: str, text: str, words: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(PlanRefused) as caught:
        LLM(model=str(folder), weights={"use": "random"})
    assert (
        words in str(caught.value)
        and "fix:" in str(caught.value)
        and "Traceback" not in str(caught.value)
    )


@pytest.mark.parametrize("scaling", ["yarn", [1], 5])
def test_rope_scaling_that_is_no_object_is_refused(
    folder: Path, scaling: object, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    assert main(["check", "--model", str(folder), "--set", "weights.use=random"]) == 2
    assert f"rope_scaling is {scaling!r}, expected an object" in capsys.readouterr().err


@pytest.mark.parametrize("ends", ["x", ["x"], [True], -1, {"a": 1}])
def test_ends_of_config_json_without_a_tokenizer(folder: Path, ends: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
    with pytest.raises(PlanRefused, match="eos_token_id is"):
        LLM(model=str(folder), weights={"use": "random"}, skip_tokenizer=True)
