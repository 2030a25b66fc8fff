"""The command in a fresh process: exit codes, no torch, processor time, listings and the schema."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from glowplug import __version__
from glowplug.core.facts.model_facts import DeviceFacts, HardwareFacts, SoftwareFacts
from glowplug.core.facts.model_folder import embedded_path
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.plugin.slots import SLOTS
from glowplug.entrypoints.bench import COMMANDS as BENCHES
from glowplug.entrypoints.checkpoints.random import COMMANDS as CHECKPOINTS
from glowplug.entrypoints.cli.main import COMMANDS, main
from glowplug.plugins.built_in import DEFAULT_PLUGINS
from tests.support.pace import child, slowness, yardstick
from tests.support.source_tree import ROOT

ENVIRONMENT = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "COLUMNS": "120"}


def glowplug(*words: str, module: str = "glowplug") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
        check=False,
    )


def test_check_ends_with_0_and_the_plan(v3: Path) -> None:
    done = glowplug("check", "--model", str(v3), "--load-format", "dummy")
    assert done.returncode == 0, done.stderr
    assert "torch_mla" in done.stdout and "memory: total" in done.stdout


def test_check_ends_with_2_and_every_reason(v3: Path, tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(f'model = "{v3}"\n[attention]\nuse = "fa3"\n[server]\nprot = 3\n')
    done = glowplug("check", "--config", str(file), "--dtype", "float17")
    assert done.returncode == 2 and done.stdout == ""
    for part in (
        "PlanRefused: 4 problems with engine.toml",
        "engine.toml:3: no component named 'fa3'",
        "engine.toml:5: unknown key",
        "did you mean 'port'",
        "--dtype float17",
        "weights.use",
    ):
        assert part in done.stderr, part
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "commands"),
    [("bench", {name: line for name, (_, line) in BENCHES.items()}), ("checkpoint", CHECKPOINTS)],
)
def test_a_missing_sub_command_lists_those_there_are(
    capsys: pytest.CaptureFixture[str], name: str, commands: dict[str, str]
) -> None:
    assert main([name]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(
        f"glowplug {name}: no COMMAND given\n\nusage: glowplug {name} COMMAND "
    )
    listed = dict(line.split(maxsplit=1) for line in said.err.splitlines() if line.startswith("  "))
    assert listed == commands and len(listed) == len(set(listed.values()))
    with pytest.raises(SystemExit, match="2"):
        main([name, "none-such"])
    assert "invalid choice: 'none-such'" in capsys.readouterr().err


def test_serve_dry_run_and_the_other_spellings(v3: Path) -> None:
    for words, module in ((("serve",), "glowplug"), ((), "glowplug.launch_server")):
        done = glowplug(
            *words,
            "--model-path",
            str(v3),
            "--load_format",
            "dummy",
            "--trust-remote-code",
            "--dry-run",
            module=module,
        )
        assert done.returncode == 0 and "multiprocess" in done.stdout, done.stderr


@pytest.mark.parametrize("words", [("check",), ("check", "--json"), ("serve", "--dry-run")])
def test_a_checkpoint_without_its_tokenizer_is_refused_as_it_would_be_when_serving(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(embedded_path(), folder)
    (folder / "tokenizer.json").write_text("{}")
    asked = [*words, "--model", str(folder)]
    assert main(asked) == 2 and f"{folder / 'tokenizer.json'}: " in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    assert main(asked) == 2
    said = capsys.readouterr()
    assert (
        said.out == ""
        and "no tokenizer was found" in said.err
        and "skip_tokenizer = true" in said.err
    )
    assert main([*asked, "--skip-tokenizer-init"]) == 0
    assert main([*asked, "--tokenizer", str(embedded_path())]) == 0
    assert main([*asked, "--tokenizer", "embedded"]) == 0
    capsys.readouterr()
    assert main([*asked, "--tokenizer", str(tmp_path / "none")]) == 2
    said = capsys.readouterr()
    assert (
        said.out == ""
        and f"no folder or file '{tmp_path / 'none'}'" in said.err
        and "tokenizer: " in said.err
    )


def test_a_plan_for_another_machine_is_not_served(v3: Path) -> None:
    done = glowplug("serve", "--model", str(v3), "--load-format", "dummy", "--facts", "8xh200")
    assert done.returncode == 2 and "--facts: the plan is for 8 x H200" in done.stderr


@pytest.mark.timing
def test_check_is_quick_and_free_of_torch(v3: Path) -> None:
    """The command takes less than a second of processor time, the start of the interpreter
    included.
    """
    code = (
        "import sys; from glowplug.entrypoints.cli.main import main; "
        f"code = main(['check', '--model', {str(v3)!r}, '--load-format', 'dummy']); "
        "heavy = [m for m in ('torch', 'transformers', 'numpy.testing', 'fastapi', 'safetensors') "
        "if m in sys.modules]; print(code, heavy, file=sys.stderr)"
    )
    seconds: list[float] = []
    paces: list[float] = []
    for _ in range(3):
        paces.append(yardstick())
        done, taken = child([sys.executable, "-c", code], ENVIRONMENT)
        seconds.append(taken)
        assert done.stderr.strip() == "0 []"
    assert min(seconds) < 1.0 * slowness(paces), (seconds, paces)


def test_json_plans_decode(v3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from glowplug.core.plan.plan import EnginePlan

    words = [
        "check",
        "--model",
        str(v3),
        "--load-format",
        "dummy",
        "--facts",
        "8xh200",
        "--api-key",
        "very-secret",
    ]
    assert main([*words, "--json"]) == 0
    text = capsys.readouterr().out
    assert "very-secret" not in text
    plan = EnginePlan.from_json(text.encode())
    assert plan.device == "cuda" and len(plan.facts.hardware.devices) == 8


def test_facts_are_a_sheet_to_plan_with(
    v3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], plugins: PluginSet
) -> None:
    assert main(["facts"]) == 0
    text = capsys.readouterr().out
    stated = json.loads(text)["packages"]  # including the packages of installed third-party plugins
    assert stated.items() >= plugins.software.packages.items() and "torch" in stated
    assert stated["ray"] == plugins.software.packages.get("ray", ""), (
        "a missing package is stated, too"
    )
    (sheet := tmp_path / "mine.json").write_text(text)
    words = ["check", "--model", str(v3), "--load-format", "dummy", "--facts", str(sheet)]
    assert main(words) == 0
    assert "of the sheet" in capsys.readouterr().out
    sheet.write_text('{"packages": {"triton": "latest"}}')
    assert (
        main(words) == 2
        and "--facts: " in (said := capsys.readouterr().err)
        and "'latest', of triton" in said
    )


def test_plugins_lists_everything(capsys: pytest.CaptureFixture[str], plugins: PluginSet) -> None:
    assert main(["plugins", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [plugin["name"] for plugin in listed][: len(DEFAULT_PLUGINS)] == list(DEFAULT_PLUGINS)
    found = {(c["slot"], c["name"]) for plugin in listed for c in plugin["components"]}
    assert found >= {
        (slot.name, r.component.name) for slot in SLOTS for r in plugins.components(slot.name)
    }
    optional = {
        r.component.name
        for slot in SLOTS
        for r in plugins.components(slot.name)
        if r.component.requires or "cpu" not in r.component.offers.devices
    }
    for plugin in listed:
        assert plugin["distribution"] and plugin["hooks"]
        assert all(c["contract"] == 2 for c in plugin["components"])
        assert all(c["available"] or c["name"] in optional for c in plugin["components"])
    assert main(["plugins", "--block-plugin", "glowplug.plugins.cache.radix"]) == 0
    text = capsys.readouterr().out
    assert "blocked: glowplug.plugins.cache.radix" in text and "cache         radix" not in text


CARD = HardwareFacts(devices=(DeviceFacts("NVIDIA H200", 141 << 30, 90),))
OLDER = HardwareFacts(devices=(DeviceFacts("NVIDIA A100", 80 << 30, 80),))


@pytest.mark.parametrize(
    ("machine", "torch", "why"),
    [
        (
            HardwareFacts(),
            "2.13.0+cpu",
            dict.fromkeys(("nccl", "cuda_graph", "hopper_mla", "triton"), "no GPU here"),
        ),
        (
            CARD,
            "2.13.0+cpu",
            dict.fromkeys(("nccl", "cuda_graph", "hopper_mla"), "torch is a CPU build"),
        ),
        (OLDER, "2.11.0+cu130", {"nccl": "", "hopper_mla": "not for NVIDIA A100"}),
        (
            CARD,
            "2.11.0+cu130",
            {"nccl": "", "hopper_mla": "needs sglang-kernel>=0.4.2 (not installed)"},
        ),
    ],
)
def test_plugins_reports_a_missing_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machine: HardwareFacts,
    torch: str,
    why: dict[str, str],
) -> None:
    monkeypatch.setattr("glowplug.entrypoints.cli.commands.plugins.this_machine", lambda: machine)
    installed = {"torch": torch, "triton": "3.6.0"}
    monkeypatch.setattr(PluginSet, "software", SoftwareFacts(packages=installed))
    assert main(["plugins", "--json"]) == 0
    found = {
        c["name"]: c
        for plugin in json.loads(capsys.readouterr().out)
        for c in plugin["components"]
        if c["slot"] != "ops"
    }
    assert {name: found[name]["why_not"] for name in why} == why
    assert all(found[name]["available"] == (not reason) for name, reason in why.items())
    assert found["torch_mla"]["available"] and found["gloo"]["available"]
    assert main(["plugins"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[1] == "nccl")
    assert line.endswith(f"  {why['nccl'] or 'yes'}")


def test_the_schema_contains_sections_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"model", "dtype", *(slot.section for slot in SLOTS if slot.section)} <= set(
        schema["properties"]
    )
    assert schema["additionalProperties"] is False
    attention = schema["properties"]["attention"]
    assert set(attention["discriminator"]["mapping"]) >= {"auto", "torch_mla", "torch_mha"}
    assert "absorb" in schema["$defs"]["TorchMlaOptions"]["properties"]


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0 and __version__ in capsys.readouterr().out
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(name in usage for name in COMMANDS)
    assert main([]) == 2
    capsys.readouterr()
    assert main(["chek"]) == 2
    assert "did you mean 'check'?" in capsys.readouterr().err


def test_a_plugin_that_fails_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad_plugin_module.py").write_text("raise RuntimeError('no')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["check", "--plugin", "bad_plugin_module"]) == 2
    assert "PluginLoadError: plugin 'bad_plugin_module'" in capsys.readouterr().err


def test_a_plugin_adds_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "greeter_plugin.py").write_text(
        "from glowplug.core.plugin.hookspecs import hookimpl\n\n@hookimpl\n"
        "def extend_cli(commands):\n"
        "    parser = commands.add_parser('greet')\n    parser.add_argument('--name')\n"
        "    parser.set_defaults(run=lambda args: print('hello', args.name) or 7)\n"
    )
    info = tmp_path / "greeter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[glowplug]\ngreeter = greeter_plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["greet", "--name", "you"]) == 7
    assert capsys.readouterr().out == "hello you\n"
