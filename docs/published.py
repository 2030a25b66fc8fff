"""Generate the page of published commands, by planning each of them and running it on a CPU."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.published_commands import LINES, Published, planned_text, run_text
from tests.support.published_tools import TOOLS, Tool, tool_text

SOURCES = {
    "S0": "ablations of DeepSeek-R1 on two nodes of 8 H20 (SGLang issue #3956): rows of its tables",
    "S1": '"DeepSeek V3 SGLang optimizations": benchmarks and annex',
    "S2": "SGLang's page on using DeepSeek",
    "S4": "SGLang's pull request of CUDA graphs for draft extension",
    "SGLang": "docstrings of the programs themselves",
}
HEAD = """# Published commands

SGLang's pages publish commands for DeepSeek models. Here only the program's name changes:
`python3 -m sglang.launch_server` becomes `python3 -m glowplug.launch_server`, and the options stay.
This page is made by running the commands. *Plan*: the plan for as many H200 as the
command needs, with the shape of its model; "no effect" lists options that change nothing in it.
*On a CPU*: a run with a tiny model, smaller numbers, and one rank in place of several; most of what
is refused there needs a GPU. Every refusal has a reason and a fix.
"""


def line_row(line: Published) -> tuple[str, ...]:
    """Return the table row of a published command line."""
    ours = line.ours.split()[2]
    return line.source, f"`{_published(line)}`", f"`{ours}`", planned_text(line), run_text(line)


def _published(line: Published) -> str:
    return f"{line.program} {line.options}".strip()


def tool_row(tool: Tool) -> tuple[str, ...]:
    """Return the table row of a published tool that is another command here."""
    return tool.source, tool.published, tool.ours, tool_text(tool)


def page(table: Callable[..., str]) -> str:
    """Return the page. ``table``: function from (head, rows) to a Markdown table."""
    parts = [HEAD, table(("tag", "source"), list(SOURCES.items()))]
    head = ("source", "published", "ours: `python3 -m`", "plan", "on a CPU")
    parts.append(table(head, [line_row(line) for line in LINES]))
    parts.append("## Tools that are other commands here\n")
    head = ("source", "published", "ours", "on a CPU")
    parts.append(table(head, [tool_row(tool) for tool in TOOLS]))
    parts.append(
        "`SGLANG_TORCH_PROFILER_DIR` names the folder of traces (`--profile`, "
        "`POST /start_profile`). Options of SGLang and vLLM without an equivalent are refused; the "
        "message names an alternative.\n"
    )
    return "\n".join(parts)
