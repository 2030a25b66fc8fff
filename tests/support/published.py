"""Published command lines: those of the project's pages, and what is needed to plan them here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.model_facts import HardwareFacts
from tests.support.source_tree import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "models").rglob("*.md")),
]
V3 = "models/shapes/deepseek-v3.json"
LITE = "models/shapes/deepseek-v2-lite.json"
SLICE = "models/shapes/deepseek-v3-slice.json"
#: part of a model's published name -> a folder's stand-in: the shape of that model
SHAPES = {"V2-Lite": LITE, "DeepSeek-V3": V3, "DeepSeek-R1": V3, "MODEL": LITE}


def command_lines() -> Iterator[tuple[str, str]]:
    """Yield (page, options) of every ``glowplug serve`` or ``check`` of a model.

    They are in sentences or in blocks without output. Those of plugins, which have tests of their
    own, are left out, and so is ``--numeric``, which starts the engine.
    """
    for page in PAGES:
        text = re.sub(
            r"^```console\n.*?^```$",
            "",
            page.read_text(encoding="utf-8"),
            flags=re.MULTILINE | re.DOTALL,
        )
        for words in re.findall(
            r"glowplug (?:serve|check) ([^`\n]*--model[^`\n]*)", re.sub(r"\\\n\s*", "", text)
        ):
            if ".gguf" not in words and "--plugin" not in words:
                planned = [word for word in words.split() if word != "--numeric"]
                yield page.relative_to(ROOT).as_posix(), " ".join(planned)


def with_shape(words: Sequence[str]) -> list[str]:
    """Return a command line with the shape of its model in place of the model's name."""
    at = next(i for i, word in enumerate(words) if word in ("--model", "--model-path")) + 1
    shape = next((shape for part, shape in SHAPES.items() if part in words[at]), words[at])
    return [*words[:at], shape, *words[at + 1 :]]


def machine_for(words: Sequence[str]) -> HardwareFacts:
    """Return the smallest ready sheet with as many GPUs as a command line needs.

    The packages Ray and xgrammar are added if the command line names their component.
    """
    sizes = [
        int(value)
        for name, value in zip(words, words[1:])
        if name in ("--tp", "--tp-size", "--tensor-parallel-size")
    ]
    ranks = max(sizes, default=1)
    machine = read_sheet("1xh200" if ranks == 1 else "8xh200" if ranks <= 8 else "2x8xh200")
    for name, version in (("ray", "2.60"), ("xgrammar", "0.2.8")):
        if name in words:
            machine = replace(machine, packages={**(machine.packages or {}), name: version})
    return machine
