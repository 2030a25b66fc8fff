"""``glowplug collect-env``: what it reports, and that secrets are left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import glowplug
from glowplug.core.facts.machine import installed
from glowplug.entrypoints.cli.commands.collect_env import HIDDEN, variables
from glowplug.entrypoints.cli.main import main
from glowplug.kernels.launch.tuned_tables import user_folder


def test_the_report_has_versions_devices_folders_and_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_TOKEN", "hush")
    assert main(["collect-env", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert found["glowplug"]["version"] == glowplug.__version__
    assert found["packages"]["torch"] == installed("torch")
    assert found["packages"]["pydantic"] == installed("pydantic")
    assert found["torch"]["version"].startswith(installed("torch").partition("+")[0])
    assert found["folders"]["models of the hub"].startswith(f"{tmp_path}/hub (does not exist")
    assert found["folders"]["tuned tables"].startswith(str(user_folder()))
    assert found["environment"]["OMP_NUM_THREADS"] == "1"
    assert found["environment"]["HF_TOKEN"] == HIDDEN and "hush" not in text
    assert set(found["devices"]) >= {"visible", "driver"}
    assert found["system"]["cpu cores"] >= 1


def test_the_text_has_the_same_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["collect-env"]) == 0
    lines = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in lines if len(words) == 1][0] == "glowplug:"
    assert ["version", glowplug.__version__] in lines
    assert ["torch", found["packages"]["torch"]] in lines
    assert "***" not in found["packages"].values()


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "hf_x", HIDDEN),
        ("GLOWPLUG_API_KEY", "k", HIDDEN),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic x", HIDDEN),
        ("RAY_PASSWORD", "p", HIDDEN),
        ("NCCL_SOCKET_IFNAME", "eth0", "eth0"),
        ("CUDA_VISIBLE_DEVICES", "0,1", "0,1"),
        ("HF_ENDPOINT", "https://me:secret@hub/x", "https://***@hub/x"),
        ("https_proxy", "http://me:secret@proxy:3128", "http://***@proxy:3128"),
        ("TOKENIZERS_PARALLELISM", "false", "false"),
        ("OPENAI_API_KEY", "sk-1", None),
        ("HOME", "/root", None),
    ],
)
def test_variables_are_chosen_and_secrets_hidden(name: str, value: str, shown: str | None) -> None:
    assert variables({name: value}).get(name) == shown
