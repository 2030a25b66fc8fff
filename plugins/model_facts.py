"""Facts of model folders in the Hugging Face layout (config.json, safetensors headers), and of a
config.json alone.
"""

from __future__ import annotations

from pathlib import Path

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.model_folder import model_facts, normalise, read_folder, read_json
from glowplug.core.plugin.hookspecs import hookimpl


@hookimpl(trylast=True)
def read_model_facts(path: Path) -> ModelFacts | None:
    if path.suffix == ".json" and path.is_file():  # the shape of a model, to plan with
        return model_facts(normalise(read_json(path)), path=str(path))
    return read_folder(path) if path.is_dir() else None
