"""Facts of a model, from a folder in the Hugging Face layout or from a config.json alone.

A folder contributes its config.json and the headers of its safetensors files.
"""

from __future__ import annotations

from pathlib import Path

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.model_folder import (
    ArchitectureRules,
    model_facts,
    normalise,
    read_folder,
    read_json,
)
from glowplug.core.plugin.hookspecs import hookimpl


@hookimpl(trylast=True)
def read_model_facts(path: Path, rules: ArchitectureRules) -> ModelFacts | None:
    if path.suffix == ".json" and path.is_file():  # a config.json is enough for a plan
        return model_facts(normalise(read_json(path), rules), path=str(path), rules=rules)
    return read_folder(path, rules) if path.is_dir() else None
