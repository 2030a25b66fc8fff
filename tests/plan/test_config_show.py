"""``glowplug config show``: every option with its source, and read back, the same plan."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.config.schema import EngineConfig
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolved import resolved_options
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.plugin.slots import SLOTS
from glowplug.entrypoints.cli.main import main
from glowplug.entrypoints.cli.toml_text import value
from tests.plan.test_flags import given
from tests.support.source_tree import ROOT

SHAPE = ["--model", str(ROOT / "models/shapes/deepseek-v3.json"), "--load-format", "dummy"]
LINES = [
    ["--facts", "cpu"],
    ["--facts", "cpu", "--config", str(ROOT / "docs/examples/laptop.toml")],
    ["--facts", "cpu", "--config", str(ROOT / "docs/examples/reference.json")],
    ["--facts", "1xh200", "--dtype", "bf16", "--speculative-algorithm", "NGRAM"],
    ["--facts", "8xh200", *SHAPE, "--tp", "8", "--enable-ep-moe", "--ep-size", "8"],
    ["--facts", "8xh200", *SHAPE, "--tp", "8", "--enable-dp-attention", "--dp-size", "8"],
    ["--facts", "cpu", "--reasoning-parser", "deepseek-r1", "--set", "outputs.0.opening=implied"],
]


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins(entry_points=False)


def same(one: EnginePlan, other: EnginePlan) -> None:
    """Check that two plans run the same engine."""
    for name in ("sizes", "mesh", "dtype", "kv_dtype", "device", "seed", "overlap", "hosts"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.budget == other.budget
    assert [c.name for c in one.choices] == [c.name for c in other.choices]
    assert one.sampled_last_layer == other.sampled_last_layer


@pytest.mark.parametrize("form", ["toml", "json"])
@pytest.mark.parametrize("words", LINES, ids=lambda words: " ".join(words)[-40:])
def test_a_resolved_configuration_gives_the_same_plan(
    tmp_path: Path,
    plugins: PluginSet,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    form: str,
) -> None:
    assert main(["config", "show", "--resolved", "--format", form, *words]) == 0
    (file := tmp_path / f"shown.{form}").write_text(capsys.readouterr().out)
    plan = given(plugins, *words).plan()
    again = given(plugins, "--config", str(file), *words[:2]).plan()
    same(plan, again)
    assert {o.path: o.value for o in resolved_options(again, plugins)} == {
        o.path: o.value for o in resolved_options(plan, plugins)
    }


def test_every_option_is_shown_with_its_source(
    plugins: PluginSet, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--facts", "cpu", "--port", "4", "--set", "attention.page_size=32"]
    assert main(["config", "show", "--resolved", *words]) == 0
    text = capsys.readouterr().out
    plan = given(plugins, *words).plan()
    shown = tomllib.loads(text)
    for choice in plan.choices:
        (slot,) = (slot for slot in SLOTS if slot.name == choice.slot)
        held = shown.get(slot.section) if slot.section else {}
        held = held[0] if slot.many and held else held
        for name, option in choice.options.items() if slot.section else ():
            assert option is None or name in held, (slot.section, name)
    names = {name for name in EngineConfig.model_fields if name not in shown}
    assert all(f"# {name} = null" in text for name in names), names
    lines = text.splitlines()

    def line(start: str) -> str:
        return next(line for line in lines if line.startswith(start))

    assert line("port = 4").endswith("# operator: --port 4")
    assert line("page_size = 32").endswith("# operator: --set attention.page_size")
    assert line("dtype = ").endswith("# auto: config.json states float32") or "# " in line("dtype")
    assert "# auto: " in line('kv_dtype = "float32"')
    assert line("drain_timeout").endswith("# default")


def test_without_resolved_only_the_given_options_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = str(ROOT / "docs/examples/laptop.toml")
    assert main(["config", "show", "--config", example, "--port", "4"]) == 0
    text = capsys.readouterr().out
    assert tomllib.loads(text) == {
        **tomllib.loads(Path(example).read_text()),
        "server": {"port": 4},
    }
    assert "# operator: laptop.toml:3" in text


def test_secrets_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("toml", "json"):
        words = ["--format", form, "--resolved", "--api-key", "hush", "--facts", "cpu"]
        assert main(["config", "show", *words]) == 0
        text = capsys.readouterr().out
        assert "hush" not in text and "***" not in text
        parsed: Mapping[str, Any] = tomllib.loads(text) if form == "toml" else json.loads(text)
        assert "api_key" not in parsed["server"]
    assert main(["config", "show", "--api-key", "hush"]) == 0
    assert "# server.api_key is a secret and not shown" in capsys.readouterr().out


def test_a_refused_configuration_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--resolved", "--set", "schedulr.overlap=false"]) == 2
    assert "did you mean 'scheduler'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "item",
    ["", 'a"b\\c', "tab\tnew\nline", "\x00\x1f\x7f", "東京 👩", True, False, 0, -3, 1.5, 1e-6]
    + [[1, 2], ["a", "b"], [], {"a b": 1, "c": ["d"]}],
)
def test_values_are_written_as_toml_reads_them(item: Any) -> None:
    assert tomllib.loads(f"x = {value(item)}") == {"x": item}
