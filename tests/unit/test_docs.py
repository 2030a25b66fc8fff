"""The documentation agrees with the code: pages are current, commands print the shown output,
examples plan.

Commands run in the environment that ``make demo`` makes, without the packages that only tests
install.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin import hookspecs
from tests.e2e.test_gpu_ranks import LAYOUTS
from tests.support.demo_environment import glowplug, glowplug_each, run
from tests.support.published import PAGES, command_lines, machine_for, with_shape
from tests.support.source_tree import PACKAGES, ROOT, sources
from tests.support.tiny import write_config

EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.*"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Yield (page, text) of every fenced block of a language."""
    for page in PAGES:
        for match in FENCE.finditer(page.read_text(encoding="utf-8")):
            if match.group(1) == language:
                yield page.relative_to(ROOT).as_posix(), match.group(2)


def test_generated_pages_are_current() -> None:
    assert generator().main(check=True) == 0, "run `make docs` and commit what it writes"


def test_combinations_are_planned_over_all_devices_of_their_machine(tmp_path: Path) -> None:
    """The rows of a sheet with 8 GPUs hold plans of 8 ranks, and some of them are admitted."""
    module = generator()
    page = module.combinations
    plugins = module.built_ins()
    write_config(tmp_path, "v3", **page.SPLIT_SIZES)
    for sheet, ranks in page.RANKS.items():
        hardware = read_sheet(sheet)
        config = {**next(page.configurations(plugins, ranks)), "weights": {"use": "random"}}
        config |= {"model": str(tmp_path), "skip_tokenizer": True}
        made = make_plan(config, plugins=plugins, hardware=hardware)
        assert made.ranks == max(1, len(hardware.devices)), sheet


def test_every_hook_and_option_has_its_line() -> None:
    """The generator leaves nothing out: its result is counted against the code."""
    hooks = (ROOT / "docs" / "hooks.md").read_text()
    names = [
        name
        for name, value in vars(hookspecs).items()
        if inspect.isfunction(value) and hasattr(value, f"{hookspecs.PROJECT}_spec")
    ]
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
                assert name == "use" or module.cell(field.description or "?") in options, (
                    component.name,
                    name,
                )


COMMANDS = [
    (page, command, output)
    for page, text in blocks("console")
    for command, output in re.findall(
        r"^\$ glowplug ([^\n]*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE
    )
]


@pytest.mark.parametrize(
    ("page", "command", "output"), COMMANDS, ids=[f"{p}:{c[:40]}" for p, c, _ in COMMANDS]
)
def test_commands_print_what_is_shown(page: str, command: str, output: str) -> None:
    """A block marked ``console`` holds real commands with their real output."""
    done = glowplug(*shlex.split(command))
    printed = (done.stdout + done.stderr).split()
    assert printed == output.split(), (
        f"{page}: `glowplug {command}` now prints other words; run `make docs`"
    )


def test_the_readme_shows_a_plan() -> None:
    assert any(page == "README.md" and command.startswith("check") for page, command, _ in COMMANDS)


CONFIGS = [
    (page, language, text)
    for language in ("toml", "yaml", "json")
    for page, text in blocks(language)
    if re.search(r"\bmodel\b\"?\s*[:=]", text)
]


@pytest.mark.parametrize(
    ("page", "language", "text"), CONFIGS, ids=[f"{p}:{i}" for i, (p, *_) in enumerate(CONFIGS)]
)
def test_configurations_in_the_pages_plan(
    page: str, language: str, text: str, tmp_path: Path
) -> None:
    file = tmp_path / f"engine.{language}"
    file.write_text(text)
    done = glowplug("check", "--config", str(file), "--facts", "cpu")
    assert done.returncode == 0, f"{page}:\n{text}\n{done.stdout}{done.stderr}"


LINES = list(command_lines())


@pytest.fixture(scope="module")
def planned_lines(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """The exit status and the output of ``glowplug check`` with each of ``LINES``."""
    folder = tmp_path_factory.mktemp("sheets")
    commands = []
    for number, (_, line) in enumerate(LINES):
        words = with_shape(shlex.split(line))
        sheet = folder / f"{number}.json"
        sheet.write_bytes(msgspec.json.encode(machine_for(words)))
        words += [] if "--facts" in words else ["--facts", str(sheet)]
        words += [] if "--load-format" in words else ["--load-format", "dummy"]
        commands.append(["check", *words])
    return glowplug_each(commands)


@pytest.mark.parametrize(
    "number", range(len(LINES)), ids=[f"{page}:{line[-40:]}" for page, line in LINES]
)
def test_command_lines_in_the_pages_plan(planned_lines: list[tuple[int, str]], number: int) -> None:
    """Each command line, SGLang's included, plans on the smallest ready sheet with enough GPUs."""
    page, line = LINES[number]
    status, said = planned_lines[number]
    assert status == 0, f"{page}: glowplug {line}\n{said}"


def test_there_are_command_lines_of_sglang() -> None:
    assert sum(page == "docs/ranks.md" for page, _ in LINES) >= 6
    assert {page for page, _ in LINES} >= {"README.md", "docs/recipes/several-hosts.md"}


def test_layouts_that_ran_on_several_gpus_are_on_record() -> None:
    """The table of layouts says "not yet" for layouts without an entry in the record, and names the
    models of the others. It has a row for each mixture among the tests that needs several GPUs,
    and the README claims no more.
    """
    record = json.loads((ROOT / "docs" / "benchmarks" / "several-gpus.json").read_text())
    ran: dict[frozenset[str], set[str]] = {}
    for one in record["ran"]:
        ran.setdefault(frozenset(re.findall(r"--[\w-]+", one["options"])), set()).add(one["model"])
    page = (ROOT / "docs" / "ranks.md").read_text()
    rows = {
        frozenset(re.findall(r"--[\w-]+", options)): said
        for options, said in re.findall(
            r"^\| ([^|]*`--[^|]*) \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE
        )
    }
    assert ran.keys() <= rows.keys()
    for options, said in rows.items():
        models = {
            model
            for model, name in (
                ("deepseek-v2-lite", "DeepSeek-V2-Lite"),
                ("deepseek-v3-slice", "slice"),
                ("embedded", "embedded model"),
            )
            if name in said
        }
        assert models == ran.get(options, set()) and (said == "not yet") == (options not in ran), (
            options
        )
    switches = ("--tp", "--ep-size", "--dp-size")
    assert {frozenset(itertools.compress(switches, layout)) for layout in LAYOUTS} <= rows.keys()
    assert frozenset({"--speculative-algorithm"}) in rows
    lines = (ROOT / "README.md").read_text().splitlines()
    claim = next(line for line in lines if "on two GPUs" in line)
    assert set(re.findall(r"`(--[^`]+)`", claim)) == {one["options"] for one in record["ran"]}


def test_the_pages_cite_the_sanitizers_present_record() -> None:
    """Commit, date, number of tests and of kernels are those of the record that the pages link."""
    folder = ROOT / "docs" / "benchmarks"
    record = json.loads((folder / "sanitizer-h200.json").read_text())
    tests = {tool: found["tests"] for tool, found in record["tools"].items()}
    accuracy = " ".join((folder / "accuracy.md").read_text().split())
    assert (
        f"[sanitizer-h200.json](sanitizer-h200.json) ({record['commit']}, {record['date'][:10]}): "
        f"{tests['memcheck']} tests under memcheck and {tests['initcheck']} under initcheck "
        f"launched all {len(record['kernels'])} kernels"
    ) in accuracy
    assert record["clean"] and not record["kernels_not_launched"]
    readme = " ".join((folder / "README.md").read_text().split())
    assert (
        f"{len({run['file'] for run in record['files']})} test files in {len(record['files'])} "
        f"runs, which launch all {len(record['kernels'])} kernels ({record['commit']}, "
    ) in readme
    assert f"{sum(tests.values())} tests, no error" in readme


def test_there_are_examples_in_each_format() -> None:
    assert {path.suffix for path in EXAMPLES} >= {".toml", ".yaml", ".json"}
    assert {language for _, language, _ in CONFIGS} >= {"toml"}


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_example_files_plan(path: Path) -> None:
    done = glowplug("check", "--config", str(path), "--facts", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr


def test_python_in_the_pages_compiles() -> None:
    parts = {text for _, _, text in excerpts()}  # a part of a file may be shown
    for page, text in blocks("python"):
        if text.partition("\n")[2] not in parts:
            compile(text, page, "exec")


def test_the_readmes_python_runs() -> None:
    """The block that needs only glowplug runs; the other one needs a server and OpenAI's client."""
    (code,) = (
        text
        for page, text in blocks("python")
        if page == "README.md" and "from glowplug import" in text
    )
    done = run("-c", code)
    assert done.returncode == 0 and done.stdout.split()[-1] == "stop", done.stdout + done.stderr


def test_files_that_pages_and_docstrings_name_exist() -> None:
    folders = "|".join((*PACKAGES, "tests", "docs"))
    named = re.compile(rf"(?<![\w./-])(?:{folders})/[\w./-]+\.(?:py|md|json|toml|yaml)\b")
    missing = [
        f"{path.relative_to(ROOT)}: {file}"
        for path in (*PAGES, *sources(), *sorted((ROOT / "tests").rglob("*.py")))
        for file in named.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / file).exists()
    ]
    assert missing == []


def excerpts() -> list[tuple[str, str, str]]:
    """Yield (page, file, text) of blocks whose first line names a file of the repository: ``#
    path/to/file``.
    """
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
        assert text.strip("\n") in (ROOT / file).read_text(), (
            f"{page}: the excerpt of {file} is out of date"
        )


def test_the_guides_plugin_runs(tmp_path: Path) -> None:
    """The files of the plugin guide, taken from the page, pass the suite, are loaded and serve
    requests.
    """
    guide = (ROOT / "docs" / "writing-a-plugin.md").read_text()
    for name in ("shortest_first", "shortest_first_runtime", "test_shortest_first"):
        body = re.search(rf"^```python\n# {name}\.py\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
        assert body is not None
        (tmp_path / f"{name}.py").write_text(body.group(1))
    write_config(tmp_path / "model", "v3")
    code = (
        "from glowplug import LLM, SamplingParams\n"
        f"with LLM(model={str(tmp_path / 'model')!r}, plugins=['shortest_first'], weights={{'use': "
        f"'random'}},\n"
        "         policy={'use': 'shortest_first', 'patience': 2.0}, skip_tokenizer=True,\n"
        "         scheduler={'max_running_requests': 1}, memory={'kv_tokens': 1024}) as llm:\n"
        "    params = SamplingParams(max_tokens=2, ignore_eos=True)\n"
        "    streams = {llm.submit([5] * length, params): length for length in (30, 20, 10)}\n"
        "    order = []\n"
        "    while len(order) < 3:\n"
        "        order += [streams[s] for s, delta in llm.poll() if s.done]\n"
        "    print(llm.plan.choice('policy').name, order)\n"
    )
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{tmp_path}", "PATH": "/usr/bin:/bin"}
    suite = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_shortest_first.py"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert suite.returncode == 0, suite.stdout
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.stdout.split("\n")[0] == "shortest_first [10, 20, 30]", done.stdout + done.stderr


def test_the_guides_model_family_serves_what_was_refused(tmp_path: Path) -> None:
    """Without the guide's model family the refusal names the guide's section; with it the model
    gives Llama's tokens.
    """
    guide = (ROOT / "docs" / "writing-a-plugin.md").read_text()
    body = re.search(
        r"^```python\n# mistral_family\.py\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL
    )
    assert body is not None
    (tmp_path / "mistral_family.py").write_text(body.group(1))
    folders = {
        name: write_config(tmp_path / name, "llama", **changes)
        for name, changes in {
            "llama": {},
            "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
            "windowed": {"architectures": ["MistralForCausalLM"], "sliding_window": 64},
        }.items()
    }
    code = (
        "import sys\nfrom glowplug import LLM, SamplingParams\n"
        "from glowplug.core.errors import PlanRefused\n"
        "def tokens(model, *plugins):\n"
        "    try:\n"
        "        with LLM(model=model, plugins=plugins, weights={'use': 'random'}, "
        "skip_tokenizer=True,\n"
        "                 memory={'kv_tokens': 1024}) as llm:\n"
        "            return llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, "
        "temperature=0))[0].token_ids\n"
        "    except PlanRefused as refused:\n"
        "        return [(one.reason, one.fix) for one in refused.refusals]\n"
        "for model, *plugins in eval(sys.argv[1]):\n"
        "    print(tokens(model, *plugins))\n"
    )
    calls = [
        (str(folders["mistral"]),),
        (str(folders["llama"]),),
        (str(folders["mistral"]), "mistral_family"),
        (str(folders["windowed"]), "mistral_family"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, repr(calls)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{tmp_path}", "PATH": "/usr/bin:/bin"},
    )
    refused, llama, mistral, windowed = (
        ast.literal_eval(line) for line in done.stdout.splitlines()
    )
    ((reason, fix),) = refused
    assert reason.startswith("no plugin builds MistralForCausalLM (known: ")
    page, _, anchor = fix.rpartition(" ")[2].partition("#")
    headings = re.findall(r"^## (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}
    assert len(llama) == 4 and mistral == llama
    assert windowed[0][0].startswith("config.json asks for a sliding window of 64 tokens")


def test_no_page_shows_a_path_of_the_machine_it_was_made_on() -> None:
    assert [page.name for page in PAGES if str(ROOT) in page.read_text(encoding="utf-8")] == []


def test_the_guide_lists_every_suite() -> None:
    guide = (ROOT / "docs" / "writing-a-plugin.md").read_text()
    suites = [path.stem for path in (ROOT / "core" / "testing" / "suites").glob("[!_]*.py")]
    assert len(suites) >= 5
    assert [name for name in suites if f"`suites.{name}`" not in guide] == []
