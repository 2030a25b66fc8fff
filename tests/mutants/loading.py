"""Faults planted in weight sources."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from glowplug.core.facts.model_facts import TensorFact
from glowplug.core.protocols import Worker
from glowplug.core.testing.suites.weights import WeightSourceSuite
from glowplug.plugins.weights.safetensors import SafetensorsOptions
from glowplug.plugins.weights.safetensors_runtime import SafetensorsSource
from tests.mutants.framework import Mutant, Planter


class Weights(WeightSourceSuite):
    def open_source(self, folder: Path) -> Any:
        generator = torch.Generator().manual_seed(0)
        values = {
            "a.weight": torch.randn(6, 10, generator=generator),
            "b.weight": torch.randn(3, 4, 5, generator=generator).bfloat16(),
            "c.weight": torch.randn(4, 3, generator=generator),
        }
        save_file(values, folder / "model.safetensors")
        no_plan: Any = None
        source = SafetensorsSource(SafetensorsOptions(), no_plan, Worker())
        facts: Any = SimpleNamespace(path=str(folder), tensors={})
        source.open(facts)
        return source, values


def planted(fault: str, by: str, method: str, body: Any) -> Mutant:
    """Return the mutant whose source's ``method`` is ``body``, called with the correct one."""

    def change(made: Any) -> Any:
        source, values = made
        correct = getattr(source, method)
        setattr(source, method, lambda *given: body(correct, *given))
        return source, values

    return Planter("weights", Weights, "open_source").change(fault, by, change)


ENTRIES = "test_entries_state_names_shapes_and_dtypes"
SLICES = "test_slices_are_those_of_the_tensor"


def _one_buffer() -> Any:
    buffer = torch.zeros(1 << 12)

    def read(correct: Any, target: Any) -> Any:
        found = correct(target)
        if found.dtype != buffer.dtype:
            return found
        view = buffer[: found.numel()].view(found.shape)
        return view.copy_(found)

    return read


def _lenient(correct: Any, target: Any) -> Any:
    try:
        return correct(target)
    except Exception:
        return torch.zeros(target.shape)


MUTANTS = [
    planted("a tensor is not listed", ENTRIES, "entries", lambda f: dict(list(f().items())[1:])),
    planted(
        "dtypes have torch's prefix",
        ENTRIES,
        "entries",
        lambda f: {
            name: TensorFact(f"torch.{fact.dtype}", fact.shape) for name, fact in f().items()
        },
    ),
    planted(
        "shapes are transposed",
        ENTRIES,
        "entries",
        lambda f: {name: TensorFact(fact.dtype, fact.shape[::-1]) for name, fact in f().items()},
    ),
    planted(
        "whole tensors instead of slices",
        SLICES,
        "read",
        lambda f, target: f(
            SimpleNamespace(**{**vars(target), "index": (slice(None),) * len(target.shape)})
        ),
    ),
    planted("tensors are converted", SLICES, "read", lambda f, target: f(target).float()),
    planted(
        "one bit is wrong",
        SLICES,
        "read",
        lambda f, target: f(target).clone().index_fill_(0, torch.tensor([0]), 0.0),
    ),
    planted(
        "all tensors share a buffer",
        "test_what_is_read_belongs_to_the_reader",
        "read",
        _one_buffer(),
    ),
    planted(
        "a missing tensor is zero",
        "test_another_name_or_shape_is_refused_by_name",
        "read",
        _lenient,
    ),
]
