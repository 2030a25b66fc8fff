"""Faulty plugins, written as installed distributions: a built-in component with one fault."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTION = "glowplug-faulty"
PACKAGE = "glowplug_faulty"
VERSION = "3.1"
ORIGIN = f"{DISTRIBUTION} {VERSION}"
PLUGIN = f"plugin 'faulty' ({ORIGIN})"
COMPONENT = "cracked"  #: the component's name, which is not the plugin's


@dataclass(frozen=True)
class Base:
    """A built-in component from which a faulty one is made.

    Attributes:
        module: module that declares it.
        hook: its registration hook.
        runtime: module and class of its runtime object.
    """

    module: str
    hook: str
    runtime: str


PLUGINS = "glowplug.plugins"
BASES = {
    "policy": Base(
        f"{PLUGINS}.scheduler.policies",
        "register_scheduling_policies",
        f"{PLUGINS}.scheduler.policies_runtime:Fcfs",
    ),
    "sampling": Base(
        f"{PLUGINS}.sampling.torch_sampler",
        "register_samplers",
        f"{PLUGINS}.sampling.torch_sampler_runtime:TorchSampler",
    ),
    "attention": Base(
        f"{PLUGINS}.attention.mla.torch",
        "register_attention_backends",
        f"{PLUGINS}.attention.mla.torch_runtime:TorchMla",
    ),
    "speculative": Base(
        f"{PLUGINS}.speculative.none",
        "register_speculative_algorithms",
        f"{PLUGINS}.speculative.none_runtime:NoSpeculation",
    ),
    "weights": Base(
        f"{PLUGINS}.weights.random",
        "register_weight_sources",
        f"{PLUGINS}.weights.random_runtime:RandomSource",
    ),
    "cache": Base(
        f"{PLUGINS}.cache.radix",
        "register_prefix_caches",
        f"{PLUGINS}.cache.radix_runtime:RadixCache",
    ),
    "scheduler": Base(
        f"{PLUGINS}.scheduler.continuous",
        "register_schedulers",
        f"{PLUGINS}.scheduler.continuous_runtime:Continuous",
    ),
    "quantization": Base(
        f"{PLUGINS}.quantization.none",
        "register_quantization_schemes",
        f"{PLUGINS}.quantization.none_runtime:NoQuantization",
    ),
    "ops": Base(
        f"{PLUGINS}.ops.torch_ops", "register_ops", f"{PLUGINS}.ops.torch_ops_runtime:TorchOps"
    ),
    "outputs": Base(
        f"{PLUGINS}.outputs.deepseek_r1",
        "register_output_parsers",
        f"{PLUGINS}.outputs.deepseek_r1_runtime:DeepseekR1",
    ),
    "grammar": Base(
        f"{PLUGINS}.grammar.llguidance",
        "register_grammars",
        f"{PLUGINS}.grammar.llguidance_runtime:Llguidance",
    ),
}
DECLARED = """
from dataclasses import replace
from typing import Any, Literal
import {module} as declaring
from glowplug.core.api import *

base = declaring.{hook}()[0]

class Faulty(base.options):
    use: Literal["{component}"] = "{component}"

def made(**changes):
    values = {{"name": "{component}", "options": Faulty, "factory": "{package}.runtime:Runtime"}}
    values["contract"] = CONTRACT
    return replace(base, **{{**values, **changes}})

@hookimpl
def {hook}():
    return [made({changes})]

{more}
"""
RUNTIME = """
import time
from typing import Any
import numpy as np
import torch
from {module} import {name} as Base

class Runtime(Base):
{body}
"""


def write(
    site: Path, slot: str, body: str = "    pass", changes: str = "", more: str = "", top: str = ""
) -> None:
    """Write the distribution of a faulty component, as installed in ``site``.

    Args:
        site: a folder of ``sys.path``.
        slot: slot of the component.
        body: body of its runtime class.
        changes: changed fields of its ``Component``, as arguments.
        more: further code of the plugin's module.
        top: the whole code of the plugin's module, in place of the above.
    """
    base = BASES[slot]
    module, _, name = base.runtime.partition(":")
    declared = DECLARED.format(
        module=base.module,
        hook=base.hook,
        package=PACKAGE,
        component=COMPONENT,
        changes=changes,
        more=more,
    )
    folder = site / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").write_text(top or declared)
    (folder / "runtime.py").write_text(RUNTIME.format(module=module, name=name, body=body))
    info = site / f"{PACKAGE}-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {VERSION}\n"
    )
    (info / "entry_points.txt").write_text(f"[glowplug]\nfaulty = {PACKAGE}\n")
    forget()


def title(slot: str) -> str:
    """Return the component as messages name it, with distribution and version."""
    return f"{slot} {COMPONENT!r} ({ORIGIN})"


def forget() -> None:
    """Remove the written package from Python's loaded modules."""
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
