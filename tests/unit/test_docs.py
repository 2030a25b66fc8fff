"""The documentation says what the code does: pages are current, commands print what is shown, examples plan."""
from __future__ import annotations

import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from glowplug.core import hookspecs
from tests.source_tree import PACKAGES, ROOT, sources
from tests.tiny import write_config

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md",
         *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "models").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.*"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """(page, text) of every fenced block of a language."""
    for page in PAGES:
        for match in FENCE.finditer(page.read_text(encoding="utf-8")):
            if match.group(1) == language:
                yield page.relative_to(ROOT).as_posix(), match.group(2)


def glowplug(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "glowplug", *words], capture_output=True, text=True, timeout=120,
                          cwd=ROOT, env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "COLUMNS": "120"},
                          check=False)


def test_generated_pages_are_current() -> None:
    assert generator().main(check=True) == 0, "run `make docs` and commit what it writes"


def test_every_hook_and_option_has_its_line() -> None:
    """The generator leaves nothing out: counted against the code, not against itself."""
    hooks = (ROOT / "docs" / "hooks.md").read_text()
    names = [name for name, value in vars(hookspecs).items()
             if inspect.isfunction(value) and hasattr(value, f"{hookspecs.PROJECT}_spec")]
    assert len(names) > 20
    assert [name for name in names if f"### `{name}`" not in hooks] == []
    options = (ROOT / "docs" / "options.md").read_text()
    module = generator()
    for slot in module.SLOTS:
        for found in module.built_ins().components(slot.name):
            component = found.component
            if slot.section:
                assert f'### `use = "{component.name}"`' in options
            for name, field in component.options.model_fields.items():
                assert name == "use" or f"| `{name}` |" in options, (component.name, name)
                assert name == "use" or module.cell(field.description or "?") in options, (component.name, name)


COMMANDS = [(page, command, output) for page, text in blocks("console")
            for command, output in re.findall(r"^\$ glowplug ([^\n]*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)]


@pytest.mark.parametrize(("page", "command", "output"), COMMANDS, ids=[f"{p}:{c[:40]}" for p, c, _ in COMMANDS])
def test_commands_print_what_is_shown(page: str, command: str, output: str) -> None:
    """A block marked ``console`` holds real commands with their real output; only the plan's fingerprint may differ,
    which depends on what is installed."""
    done = glowplug(*shlex.split(command))
    shown, printed = (re.sub(r"\b[0-9a-f]{16}\b", "FINGERPRINT", text).split()
                      for text in (output, done.stdout + done.stderr))
    assert printed == shown, f"{page}: `glowplug {command}` now prints other words; run `make docs`"


def test_the_readme_shows_a_plan() -> None:
    assert any(page == "README.md" and command.startswith("check") for page, command, _ in COMMANDS)


CONFIGS = [(page, language, text) for language in ("toml", "yaml", "json") for page, text in blocks(language)
           if re.search(r"\bmodel\b\"?\s*[:=]", text)]


@pytest.mark.parametrize(("page", "language", "text"), CONFIGS, ids=[f"{p}:{i}" for i, (p, *_) in enumerate(CONFIGS)])
def test_configurations_in_the_pages_plan(page: str, language: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / f"engine.{language}"
    file.write_text(text)
    done = glowplug("check", "--config", str(file), "--facts", "cpu")
    assert done.returncode == 0, f"{page}:\n{text}\n{done.stdout}{done.stderr}"


def test_there_are_examples_in_each_format() -> None:
    assert {path.suffix for path in EXAMPLES} >= {".toml", ".yaml", ".json"}
    assert {language for _, language, _ in CONFIGS} >= {"toml"}


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_example_files_plan(path: Path) -> None:
    done = glowplug("check", "--config", str(path), "--facts", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr


def test_python_in_the_pages_compiles() -> None:
    parts = {text for _, _, text in excerpts()}  # a part of a file need not be whole
    for page, text in blocks("python"):
        if text.partition("\n")[2] not in parts:
            compile(text, page, "exec")


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            if "://" not in target and not target.startswith("mailto:") and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_files_that_pages_and_docstrings_name_exist() -> None:
    folders = "|".join((*PACKAGES, "tests", "docs"))
    named = re.compile(rf"(?<![\w./-])(?:{folders})/[\w./-]+\.(?:py|md|json|toml|yaml)\b")
    missing = [f"{path.relative_to(ROOT)}: {file}"
               for path in (*PAGES, *sources(), *sorted((ROOT / "tests").rglob("*.py")))
               for file in named.findall(path.read_text(encoding="utf-8")) if not (ROOT / file).exists()]
    assert missing == []


def excerpts() -> list[tuple[str, str, str]]:
    """(page, file, text) of blocks whose first line names a file of the repository: ``# path/to/file``."""
    found = []
    for language in ("python", "toml"):
        for page, text in blocks(language):
            first, _, rest = text.partition("\n")
            if first.startswith("# ") and "/" in first and (ROOT / first[2:].strip()).exists():
                found.append((page, first[2:].strip(), rest))
    return found


def test_excerpts_are_of_the_files_they_name() -> None:
    assert len(excerpts()) >= 4
    for page, file, text in excerpts():
        assert text.strip("\n") in (ROOT / file).read_text(), f"{page}: the excerpt of {file} is out of date"


def test_the_guides_plugin_runs(tmp_path: Path) -> None:
    """The files of the plugin guide, taken from the page: they pass the suite, are loaded and served with."""
    guide = (ROOT / "docs" / "writing-a-plugin.md").read_text()
    for name in ("shortest_first", "shortest_first_runtime", "test_shortest_first"):
        body = re.search(rf"^```python\n# {name}\.py\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
        assert body is not None
        (tmp_path / f"{name}.py").write_text(body.group(1))
    write_config(tmp_path / "model", "v3")
    code = ("from glowplug import LLM, SamplingParams\n"
            f"with LLM(model={str(tmp_path / 'model')!r}, plugins=['shortest_first'], weights={{'use': 'random'}},\n"
            "         policy={'use': 'shortest_first', 'patience': 2.0}, skip_tokenizer=True,\n"
            "         scheduler={'max_running_requests': 1}, memory={'kv_tokens': 1024}) as llm:\n"
            "    params = SamplingParams(max_tokens=2, ignore_eos=True)\n"
            "    streams = {llm.submit([5] * length, params): length for length in (30, 20, 10)}\n"
            "    order = []\n"
            "    while len(order) < 3:\n"
            "        order += [streams[s] for s, delta in llm.poll() if s.done]\n"
            "    print(llm.plan.choice('policy').name, order)\n")
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{tmp_path}", "PATH": "/usr/bin:/bin"}
    suite = subprocess.run([sys.executable, "-m", "pytest", "-q", "test_shortest_first.py"], cwd=tmp_path, check=False,
                           capture_output=True, text=True, timeout=120, env=environment)
    assert suite.returncode == 0, suite.stdout
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
                          env=environment)
    assert done.stdout.split("\n")[0] == "shortest_first [10, 20, 30]", done.stdout + done.stderr


def test_no_page_shows_a_path_of_the_machine_it_was_made_on() -> None:
    assert [page.name for page in PAGES if str(ROOT) in page.read_text(encoding="utf-8")] == []


def test_the_guide_lists_every_suite() -> None:
    guide = (ROOT / "docs" / "writing-a-plugin.md").read_text()
    suites = [path.stem for path in (ROOT / "core" / "testing").glob("*_suite.py")]
    assert len(suites) >= 5
    assert [name for name in suites if f"`{name}`" not in guide] == []
