"""Small kernels compiled by torch.compile.

Steps of few tokens run inductor's programs for the torch references.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import OPERATIONAL, CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import OpsOffers
from glowplug.core.plugin.options import OpsOptions
from glowplug.core.plugin.requirements import installation
from glowplug.plugins.ops.torch_ops import TABLE

NAME = "torch_compile"


class TorchCompileOptions(OpsOptions):
    use: Literal["torch_compile"] = "torch_compile"
    max_batch: int = Field(
        32,
        ge=1,
        description="largest number of sequences in a compiled step; larger steps and long "
        "prompts run the device's other kernels",
    )
    cache_dir: str | None = Field(
        None,
        description="folder that keeps compiled programs between starts; None: "
        "TORCHINDUCTOR_CACHE_DIR, or ~/.cache/glowplug/inductor",
        json_schema_extra=OPERATIONAL,
    )


def check_torch_compile(context: CheckContext) -> Iterator[Refusal]:
    """Refuse the component if inductor's compiler is missing: C++ for a CPU, Triton for CUDA."""
    software = context.facts.software
    fix = 'ops.use = "auto"'
    if context.values.device == "cpu" and not software.cxx:
        yield Refusal(
            NAME,
            "ops.use",
            "torch.compile needs a C++ compiler on a CPU, and none is installed",
            f"install g++, or set CXX to a compiler; or {fix}",
        )
    if context.values.device == "cuda" and not software.packages.get("triton"):
        yield Refusal(
            NAME,
            "ops.use",
            "torch.compile needs triton on CUDA (not installed)",
            f"{installation('triton>=3.5', context.facts.hardware)}; or {fix}",
        )


@hookimpl
def register_ops() -> list[Component]:
    return [
        Component(
            name=NAME,
            options=TorchCompileOptions,
            check=check_torch_compile,
            factory="glowplug.plugins.ops.torch_compile_runtime:TorchCompileOps",
            offers=OpsOffers(devices=frozenset({"cpu", "cuda"}), ops=TABLE),
            summary="small kernels of small steps compiled by torch.compile, kept between starts",
        )
    ]
