"""Facts about model, hardware and software, which a plan cannot choose.

Model facts come from a model folder's ``config.json`` and tensor headers, hardware facts from the
machine or from a ``--facts`` sheet, software facts from installed distributions. All classes are
frozen, can be written as JSON and read again (``msgspec.json``), and need no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from glowplug.core.facts.layer_sizes import LayerSizes, SplitDimension


@dataclass(frozen=True)
class TensorFact:
    """One tensor of a checkpoint.

    Attributes:
        dtype: torch's name for its dtype, for example "float8_e4m3fn" or "bfloat16".
        shape: its shape.
        file: name of its file, relative to the model folder.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str = ""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model and its checkpoint.

    Attributes:
        path: folder or file that was read; "" for none.
        architecture: first entry of ``architectures`` in config.json.
        format: format of the weights ("safetensors", "gguf"); "none" without weights.
        kind: attention kind, "mla" or "mha".
        config: config.json as a plain dict in its normalised form (``model_folder.normalise``), in
            which ``rope_parameters`` is replaced by ``rope_scaling`` and ``rope_theta``.
        dtype: ``torch_dtype`` of the checkpoint.
        vocab_size: number of tokens of the vocabulary.
        hidden_size: size of the hidden states.
        num_layers: number of decoder layers.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads.
        head_dim: elements of a head's query and key.
        max_positions: longest sequence of the model, in tokens.
        kv_lora_rank: size of MLA's latent; 0 for other attention.
        qk_rope_head_dim: rotary elements of a head's query and key; 0 if not stated.
        n_routed_experts: number of routed experts; 0 for a dense model.
        quant_method: ``quantization_config.quant_method``, or "none".
        quant_block: (rows, columns) of a weight block, or None.
        nextn_layers: number of multi-token-prediction layers in the checkpoint.
        tensors: all tensors by name; empty if only config.json was read.
        chat_template: source of the tokenizer's chat template; "" for none.
        digest: digest of the weights' content: names, shapes and dtypes of all tensors, sizes of
            their files and samples of their bytes (``model_folder.with_digest``); "" without
            weights, and until a plan is accepted.
        notes: remarks on the checkpoint, for the plan's table.
        sizes: further sizes of its layers, as its family declares them (``ModelOffers.inventory``).
        splits: dimensions that ranks split, also declared by its family; () if it declares none.
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
    sizes: LayerSizes = field(default_factory=LayerSizes)
    splits: tuple[SplitDimension, ...] = ()


def stated(model: ModelFacts, key: str, default: int = 0) -> int:
    """Return the whole number at ``key`` in config.json, or ``default`` if there is none."""
    value = model.config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


@dataclass(frozen=True)
class DeviceFacts:
    """One accelerator.

    Attributes:
        name: name that the driver reports.
        memory: bytes of device memory.
        compute: CUDA compute capability, 90 for SM90; 0 if unknown.
        bandwidth: memory bandwidth in bytes per second; 0 if unknown.
    """

    name: str
    memory: int
    compute: int
    bandwidth: float = 0.0


@dataclass(frozen=True)
class HardwareFacts:
    """The hosts that a plan is made for, which are all equal.

    Attributes:
        hosts: number of hosts.
        devices: accelerators of each host; empty for CPU only.
        cpu_cores: CPU cores of each host.
        cpu_memory: bytes of memory of each host.
        name: name for messages.
        packages: version of each installed package by normalised name, as a fact sheet states them
            ("" for a package that is not installed); None if the sheet states none, or if these are
            the facts of this machine itself.
    """

    hosts: int = 1
    devices: tuple[DeviceFacts, ...] = ()
    cpu_cores: int = 1
    cpu_memory: int = 0
    name: str = "this machine"
    packages: dict[str, str] | None = None

    @property
    def device(self) -> str:
        """Device type of the hosts, "cuda" or "cpu"."""
        return "cuda" if self.devices else "cpu"


@dataclass(frozen=True)
class SoftwareFacts:
    """Installed software.

    Attributes:
        python: version of Python.
        packages: version of each installed distribution by normalised name.
        cxx: path of a C++ compiler; "" for none.
    """

    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    cxx: str = ""


@dataclass(frozen=True)
class Facts:
    """All facts that a plan depends on.

    Attributes:
        model: facts of the model.
        hardware: facts of the hosts.
        software: facts of the installed software.
        draft: facts of the draft model's folder; None if it has no folder of its own.
    """

    model: ModelFacts
    hardware: HardwareFacts
    software: SoftwareFacts
    draft: ModelFacts | None = None
