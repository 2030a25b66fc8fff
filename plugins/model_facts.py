"""Facts of model folders in the Hugging Face layout (config.json, safetensors headers)."""
from __future__ import annotations

from pathlib import Path

from glowplug.core.facts import ModelFacts
from glowplug.core.facts_read import read_folder
from glowplug.core.hookspecs import hookimpl


@hookimpl(trylast=True)
def read_model_facts(path: Path) -> ModelFacts | None:
    return read_folder(path) if path.is_dir() else None
