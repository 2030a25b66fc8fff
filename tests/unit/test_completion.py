"""Shell completion: the scripts complete commands, flags, values and files in their shells."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from glowplug.entrypoints.cli.commands.completion import CommandWords, all_commands
from glowplug.entrypoints.cli.flags.table import FLAGS
from glowplug.entrypoints.cli.main import COMMANDS
from glowplug.entrypoints.cli.shell_scripts import SCRIPTS

#: words on the command line -> words that are offered, and words that are not
CASES: list[tuple[list[str], set[str], set[str]]] = [
    (["s"], {"serve", "schema"}, {"bench", "--model"}),
    ([""], set(COMMANDS), {"--model"}),
    (["serve", "--chun"], {"--chunked-prefill-size"}, {"--port"}),
    (["serve", "--port", "4", "--otlp"], {"--otlp-traces-endpoint"}, set()),
    (["serve", "--plan", ""], {"brief", "full", "none"}, {"--port"}),
    (["serve", "--plan", "b"], {"brief"}, {"full"}),
    (["bench", "ser"], {"serving"}, {"soak"}),
    (["bench", "serving", "--num-p"], {"--num-prompts"}, {"--chunked-prefill-size"}),
    (["config", "show", "--re"], {"--resolved", "--revision"}, set()),
    (["completion", ""], {"bash", "fish", "zsh"}, set()),
    (["serve", "--config", "mod"], {"model file.toml"}, {"--model"}),
    (["serve", "--api-key", "'; touch x"], set(), {"--model"}),
]


@pytest.fixture(scope="module")
def commands() -> list[CommandWords]:
    return list(all_commands())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, commands: list[CommandWords]) -> Path:
    """A folder with the scripts and a file to complete."""
    made = tmp_path_factory.mktemp("completion")
    for shell, script in SCRIPTS.items():
        (made / f"glowplug.{shell}").write_text(script(commands))
    (made / "model file.toml").write_text("")
    return made


def test_every_command_and_flag_is_known(commands: list[CommandWords]) -> None:
    by_path = {command.path: command for command in commands}
    assert by_path[()].commands.keys() >= COMMANDS.keys()
    assert all((name,) in by_path for name in COMMANDS)
    names = {name for flag in by_path["serve",].flags for name in flag.names}
    assert {name for flag in FLAGS for name in flag.names} <= names
    assert ("bench", "serving") in by_path and ("config", "show") in by_path


def offered_by_bash(folder: Path, words: list[str]) -> list[str]:
    """Return the completions that bash offers for the last word of ``glowplug WORDS``."""
    quoted = " ".join("'" + word.replace("'", "'\\''") + "'" for word in ["glowplug", *words])
    program = f"""
        source glowplug.bash || exit 1
        COMP_WORDS=({quoted})
        COMP_CWORD={len(words)}
        _glowplug || exit 1
        ((${{#COMPREPLY[@]}})) && printf '%s\\n' "${{COMPREPLY[@]}}"
        exit 0
    """
    done = subprocess.run(
        ["bash", "--norc", "-u", "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


def _name(value: list[str] | set[str]) -> str:
    """Return a test's name, which has to be the same in each process."""
    return " ".join(value if isinstance(value, list) else sorted(value))[:30]


@pytest.mark.parametrize(("words", "wanted", "others"), CASES, ids=_name)
def test_bash_completes(folder: Path, words: list[str], wanted: set[str], others: set[str]) -> None:
    found = set(offered_by_bash(folder, words))
    assert wanted <= found and not others & found
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["glowplug.bash", "glowplug.fish", "glowplug.zsh", "model file.toml"]
    ), "words are data"


@pytest.mark.parametrize(("words", "wanted", "others"), CASES, ids=_name)
def test_fish_completes(folder: Path, words: list[str], wanted: set[str], others: set[str]) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    line = " ".join(["glowplug", *words])
    if "'" in line:
        pytest.skip("an open quote is no word")
    program = f"source glowplug.fish; complete -C '{line}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = {line.partition("\t")[0].replace("\\ ", " ") for line in done.stdout.splitlines()}
    assert wanted <= found and not others & found, found


def test_zsh_reads_the_script(folder: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    program = """
        autoload -Uz compinit && compinit -u -d ./dump
        source ./glowplug.zsh
        [[ ${_comps[glowplug]} == _glowplug ]] || exit 3
        print -r -- ${(M)${(f)_glowplug_commands[/]}:#serve:*}
        print -r -- ${(M)${(f)_glowplug_options[/bench/serving]}:#*--num-prompts*}
    """
    done = subprocess.run(
        ["zsh", "-f", "-c", program], cwd=folder, capture_output=True, text=True, timeout=60
    )
    (folder / "dump").unlink(missing_ok=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("serve:serve a model") and "--num-prompts[" in second
