"""glowplug: an LLM inference engine for DeepSeek-type models whose every technique is a plugin.

>>> from glowplug import LLM, SamplingParams
>>> with LLM(model="embedded") as llm:
...     print(llm.generate(["The capital of France is"], SamplingParams(max_tokens=8))[0].text)

Names are imported on first use: ``import glowplug`` alone stays free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LLM", "PlanRefused", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from glowplug.core.errors import PlanRefused
    from glowplug.core.step.request import SamplingParams
    from glowplug.entrypoints.front.llm import LLM

_LAZY = {
    "LLM": "glowplug.entrypoints.front.llm",
    "SamplingParams": "glowplug.core.step.request",
    "PlanRefused": "glowplug.core.errors",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'glowplug' has no attribute {name!r}")
