"""The command lines that SGLang's pages publish: each is planned, and run on a CPU, as the page of
published commands states.
"""

from __future__ import annotations

import re

import pytest
from _pytest.mark.structures import ParameterSet

from glowplug.entrypoints.cli.flags.table import FLAGS
from tests.support import published_commands as published
from tests.support.published_commands import LINES, PROGRAMS
from tests.support.published_tools import TOOLS, Tool, tool_text
from tests.support.source_tree import ROOT

PAGE = ROOT / "docs" / "published-commands.md"
#: every flag that the published pages name
PUBLISHED_FLAGS = """
--model --model-path --tp --tp-size --ep-size --enable-ep-moe --enable-dp-attention
--trust-remote-code --dtype --quantization --kv-cache-dtype --disable-mla --enable-flashinfer-mla
--attention-backend --disable-cuda-graph --disable_cuda_graph --cuda-graph-bs --cuda-graph-max-bs
--enable-torch-compile --torch-compile-max-bs --disable-radix-cache --disable-overlap-schedule
--speculative-algorithm --speculative-algo --speculative-draft-model-path --speculative-draft
--speculative-num-steps --speculative-eagle-topk --speculative-num-draft-tokens
--max-running-requests --mem-fraction-static --dist-timeout --host --port --profile --batch-size
--input --output --output-file
""".split()


def row_of(*cells: str) -> str:
    """Return the start of a table row with these cells."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def test_every_published_flag_is_in_a_published_line() -> None:
    given = {word for line in LINES for word in line.words}
    assert [flag for flag in PUBLISHED_FLAGS if flag not in given] == []
    known = {name for flag in FLAGS for name in flag.names}
    engine = {word for line in LINES if line.program == published.SERVER for word in line.words}
    assert {word for word in engine if word.startswith("--")} <= known


def test_every_program_has_a_line_and_only_the_programs_name_changes() -> None:
    assert {line.program for line in LINES} == PROGRAMS.keys()
    for line in LINES:
        program, module, *options = line.ours.split()
        assert (program, module) == ("python3", "-m") and " ".join(options[1:]) == line.options
        assert (ROOT / "src" / f"{options[0].replace('.', '/')}.py").is_file()


def test_the_page_has_a_row_for_each_line_and_tool() -> None:
    rows = re.findall(r"^\| S\w* \| ", PAGE.read_text(), re.MULTILINE)
    tags = {line.source for line in LINES}
    assert len(rows) == len(LINES) + len(TOOLS) + len(tags)


def marked(line: published.Published) -> ParameterSet:
    """Return a line as a parameter; those that compile, or start several engines, are slow."""
    compiled = ("--enable-torch-compile", "--torch-compile-max-bs 1 --disable")
    slow = "speculative" in line.program or any(word in line.options for word in compiled)
    name = f"{line.source}-{line.options[-60:]}"
    return pytest.param(line, id=name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("line", map(marked, LINES))
def test_a_published_line_is_planned_and_run_as_the_page_states(line: published.Published) -> None:
    text = f"{line.program} {line.options}".strip()
    ours = line.ours.split()[2]
    row = row_of(
        line.source,
        f"`{text}`",
        f"`{ours}`",
        published.planned_text(line),
        published.run_text(line),
    )
    assert row in PAGE.read_text().splitlines(), f"run `make docs`: {row}"


def marked_tool(tool: Tool) -> ParameterSet:
    """Return a tool as a parameter; those that compile are slow."""
    slow = any("--enable-torch-compile" in run for run in tool.runs)
    return pytest.param(tool, id=tool.published[:40], marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("tool", map(marked_tool, TOOLS))
def test_a_published_tool_is_another_command_as_the_page_states(tool: Tool) -> None:
    row = row_of(tool.source, tool.published, tool.ours, tool_text(tool))
    assert row in PAGE.read_text().splitlines(), f"run `make docs`: {row}"
