"""Facts: what is given and cannot be chosen. Frozen, torch-free, JSON both ways (``msgspec.json``).

Model facts come from a model folder's ``config.json`` and tensor headers, hardware facts from the
machine or from a ``--facts`` sheet, software facts from installed distributions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TensorFact:
    """One tensor of a checkpoint: torch dtype name ("float8_e4m3fn", "bfloat16", ...), shape, file
    (relative).
    """

    dtype: str
    shape: tuple[int, ...]
    file: str = ""


@dataclass(frozen=True)
class ModelFacts:
    """What a checkpoint says of itself.

    Attributes:
        path: folder or file it was read from ("" for none).
        architecture: first of ``architectures``.
        format: weight format found ("safetensors", "gguf", "none" when there are no weights).
        kind: attention kind, "mla" or "mha".
        config: config.json as a plain dict, normalised: ``rope_parameters`` folded into
            ``rope_scaling`` and ``rope_theta``, see ``facts_read.normalise``.
        dtype: ``torch_dtype`` of the checkpoint.
        quant_method: ``quantization_config.quant_method`` or "none".
        quant_block: weight block shape or None.
        nextn_layers: number of multi-token-prediction layers it carries.
        tensors: every tensor by name; empty when only config.json was read.
        chat_template: the tokenizer's chat template, "" when it has none.
        digest: of the weights' content: names, shapes and dtypes of all tensors, sizes of their
            files and samples of their bytes (``facts_read.with_digest``); "" without weights, and
            until a plan is accepted.
        notes: remarks for the plan table.
    """

    path: str
    architecture: str
    format: str
    kind: str
    config: dict[str, Any]
    dtype: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    n_routed_experts: int = 0
    quant_method: str = "none"
    quant_block: tuple[int, int] | None = None
    nextn_layers: int = 0
    tensors: dict[str, TensorFact] = field(default_factory=dict)
    chat_template: str = ""
    digest: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceFacts:
    """One accelerator. ``memory`` in bytes; ``compute`` 90 = SM90; ``bandwidth`` in bytes a second
    (0: unknown).
    """

    name: str
    memory: int
    compute: int
    bandwidth: float = 0.0


@dataclass(frozen=True)
class HardwareFacts:
    """Machines the plan is for: ``hosts`` equal hosts of ``devices`` each; empty ``devices`` means
    CPU only.

    ``packages``: versions of installed packages by normalised name, as a sheet states them ("": not
    installed); None: the sheet does not, or this is the machine itself.
    """

    hosts: int = 1
    devices: tuple[DeviceFacts, ...] = ()
    cpu_cores: int = 1
    cpu_memory: int = 0
    name: str = "this machine"
    packages: dict[str, str] | None = None

    @property
    def device(self) -> str:
        return "cuda" if self.devices else "cpu"


@dataclass(frozen=True)
class SoftwareFacts:
    """Installed distributions by normalised name, the Python version, and the path of a C++
    compiler ("": none).
    """

    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    cxx: str = ""


@dataclass(frozen=True)
class Facts:
    """``draft``: facts of the draft model's own folder, when it has one."""

    model: ModelFacts
    hardware: HardwareFacts
    software: SoftwareFacts
    draft: ModelFacts | None = None
