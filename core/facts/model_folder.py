"""Facts of a model folder in the Hugging Face layout: config.json, safetensors headers, chat
template. No torch.

Nothing here maps a weight or runs code from the folder. Errors are FactsError (config) and
WeightError (headers).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from glowplug.core.errors import FactsError
from glowplug.core.facts.model_facts import ModelFacts, TensorFact
from glowplug.core.facts.safetensors_header import read_tensors
from glowplug.core.facts.weight_classes import next_token_layer

EMBEDDED = "embedded"  #: the name of the shipped model
MAX_JSON = 64 << 20  #: bytes; a config.json or tokenizer_config.json beyond it is refused
#: pieces read of a checkpoint in all, and of each of its files at least
SAMPLES = 256
FEWEST_SAMPLES = 2
SAMPLE_BYTES = 4096  #: of one piece
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")

#: what a family's config.json means when it does not say (transformers drops both keys for V3 on
#: saving)
GATE_DEFAULTS: dict[str, dict[str, str]] = {
    "DeepseekV3ForCausalLM": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "DeepseekV2ForCausalLM": {"scoring_func": "softmax"},
    "DeepseekV3ForCausalLMNextN": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
#: how architectures end of which a folder holds next-token layers and nothing else
NEXTN_ALONE = "ForCausalLMNextN"


def embedded_path() -> Path:
    """Folder of the shipped model."""
    return Path(__file__).absolute().parents[2] / "models" / "embedded" / "checkpoint"


def locate_model(name: str) -> str:
    """The folder or file that ``model = name`` means: "embedded", a path, or a hub id that is
    already downloaded.

    Raises FactsError; nothing is ever downloaded.
    """
    if name == EMBEDDED:
        path = embedded_path()
        if not path.is_dir():
            raise FactsError(
                f"the embedded model is missing from this installation ({path})",
                "reinstall glowplug",
            )
        return str(path)
    expanded = os.path.expanduser(name)
    if os.path.exists(expanded):  # False also for names that no file can have
        return expanded
    cached = _hub_snapshot(name)
    if cached is not None:
        return str(cached)
    fix = f'write a folder that exists, "{EMBEDDED}" for the shipped model'
    if HUB_ID.fullmatch(name):
        fix += f", or download it first: hf download {name}"
    raise FactsError(f"no folder or file {name!r}, and no downloaded model of that name", fix)


def _hub_snapshot(name: str) -> Path | None:
    """Newest snapshot of a hub id in the local hub cache. NOTE: HF_HOME is that cache's own way to
    say where it is.
    """
    if not HUB_ID.fullmatch(name):
        return None
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    snapshots = home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots"
    found = [path for path in snapshots.glob("*") if (path / "config.json").exists()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def read_folder(path: Path) -> ModelFacts | None:
    """Facts of the model folder at ``path``; None when it has no config.json."""
    if not (path / "config.json").is_file():
        return None
    config = normalise(read_json(path / "config.json"))
    tensors = read_tensors(path)
    return model_facts(
        config, path=str(path), tensors=tensors, chat_template=read_chat_template(path)
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. FactsError naming the file otherwise."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise FactsError(
                f"{path}: {path.stat().st_size} bytes is too large for a JSON configuration"
            )
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FactsError(
            f"{path} could not be read as JSON: {str(error)[:200]}", "download the file again"
        ) from None
    if not isinstance(data, dict):
        raise FactsError(
            f"{path} holds a JSON {type(data).__name__}, expected an object",
            "download the file again",
        )
    return data


def normalise(config: dict[str, Any]) -> dict[str, Any]:
    """config.json as the published checkpoints write it: ``rope_theta``, ``rope_scaling`` (with
    both ``type`` and ``rope_type``, None when plain), ``torch_dtype``, and the gate's defaults
    filled in."""
    config = dict(config)
    parameters = config.pop("rope_parameters", None)
    if isinstance(parameters, dict):
        scaling = dict(parameters)
        theta = scaling.pop("rope_theta", None)
        if theta is not None:
            config.setdefault("rope_theta", theta)
        config["rope_scaling"] = config.get("rope_scaling") or scaling
    stated = config.get("rope_scaling") or None
    if isinstance(stated, dict):
        kind = stated.get("rope_type", stated.get("type", "default"))
        stated = None if kind == "default" else {**stated, "type": kind, "rope_type": kind}
    config["rope_scaling"] = stated
    dtype = str(config.pop("dtype", None) or config.get("torch_dtype") or "bfloat16").removeprefix(
        "torch."
    )
    config["torch_dtype"] = dtype
    _fill_gate(config)
    return config


def _fill_gate(config: dict[str, Any]) -> None:
    architecture = (config.get("architectures") or [""])[0]
    for key, value in GATE_DEFAULTS.get(architecture, {}).items():
        if config.get(key) is None:
            config[key] = value
    if architecture == "DeepseekV2ForCausalLM" and config.get("topk_method") is None:
        config["topk_method"] = (
            "group_limited_greedy" if (config.get("n_group") or 1) > 1 else "greedy"
        )


def model_facts(
    config: dict[str, Any],
    *,
    path: str = "",
    tensors: dict[str, TensorFact] | None = None,
    chat_template: str = "",
    format: str = "",
) -> ModelFacts:
    """Facts from a normalised config. FactsError naming the first key that is missing or of the
    wrong type.
    """
    tensors = tensors or {}
    integer = _Reader(config, path)
    architectures = config.get("architectures")
    if not (
        isinstance(architectures, list) and architectures and isinstance(architectures[0], str)
    ):
        raise FactsError(
            f"{path}/config.json names no architecture",
            'add "architectures": ["..."] to config.json',
        )
    layers = integer("num_hidden_layers")
    hidden = integer("hidden_size")
    heads = integer("num_attention_heads")
    rope = integer("qk_rope_head_dim", 0)
    lora = integer("kv_lora_rank", 0)
    quant = config.get("quantization_config")
    quant = quant if isinstance(quant, dict) else {}
    if architectures[0].endswith(NEXTN_ALONE):
        layers, config = 0, {**config, "num_nextn_predict_layers": layers}
    nextn, notes = _nextn(config, layers, tensors)
    return ModelFacts(
        path=path,
        architecture=architectures[0],
        format=format or ("safetensors" if tensors else "none"),
        kind="mla" if lora else "mha",
        config=config,
        dtype=config["torch_dtype"],
        vocab_size=integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=integer("num_key_value_heads", heads),
        head_dim=integer("qk_nope_head_dim", 0) + rope
        if lora
        else integer("head_dim", hidden // heads),
        max_positions=integer("max_position_embeddings", 2048),
        kv_lora_rank=lora,
        qk_rope_head_dim=rope,
        n_routed_experts=integer("n_routed_experts", 0),
        quant_method=str(quant.get("quant_method") or "none"),
        quant_block=_block(quant.get("weight_block_size"), path),
        nextn_layers=nextn,
        tensors=tensors,
        chat_template=chat_template,
        notes=notes,
    )


class _Reader:
    """Reads positive whole numbers from a config; ``default`` stands for a missing key."""

    def __init__(self, config: dict[str, Any], path: str) -> None:
        self.config = config
        self.path = path

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or value < (1 if default is None else 0)
        ):
            shown = (
                "is missing" if value is None else f"is {value!r}, expected a positive whole number"
            )
            raise FactsError(
                f"{self.path}/config.json: {key} {shown}", "use the checkpoint's own config.json"
            )
        return value


def _block(value: Any, path: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(n, int) and n > 0 for n in value)
    ):
        return (value[0], value[1])
    raise FactsError(
        f"{path}/config.json: weight_block_size is {value!r}, expected two positive whole numbers",
        "use the checkpoint's own config.json",
    )


def _nextn(
    config: dict[str, Any], layers: int, tensors: dict[str, TensorFact]
) -> tuple[int, tuple[str, ...]]:
    """Multi-token-prediction layers: those the tensors hold beyond the last layer, else those
    config.json states.
    """
    stated = config.get("num_nextn_predict_layers") or 0
    if not tensors:
        return int(stated), ()
    beyond = {number for name in tensors if (number := next_token_layer(name, layers)) >= 0}
    if stated and not beyond:
        return 0, (f"config.json states {stated} next-token layers, the checkpoint holds none",)
    return len(beyond), ()


def with_digest(facts: ModelFacts) -> ModelFacts:
    """Return ``facts`` with the digest of their weights; as they are without tensors, or with a
    digest.

    Covers names, dtypes and shapes of all tensors, the size of each file that holds some, and
    samples of its bytes, so that two checkpoints of one shape differ where their weights do.
    """
    if facts.digest or not facts.tensors:
        return facts
    found = hashlib.sha256(msgspec.json.encode(facts.tensors, order="sorted"))
    files = sorted({fact.file for fact in facts.tensors.values()})
    path = Path(facts.path)
    each = max(FEWEST_SAMPLES, SAMPLES // len(files))
    for name in files:
        file = path / name if path.is_dir() else path
        if file.is_file():
            _sample(file, each, found.update)
    return replace(facts, digest=found.hexdigest()[:16])


def _sample(file: Path, count: int, update: Callable[[bytes], object]) -> None:
    """Pass a file's size and ``count`` pieces of it on, at even distances up to its end."""
    size = file.stat().st_size
    update(size.to_bytes(8, "little"))
    with open(file, "rb", buffering=0) as stream:
        for number in range(1, count + 1):
            stream.seek(max(0, size * number // count - SAMPLE_BYTES))
            update(stream.read(SAMPLE_BYTES))


def read_chat_template(path: Path) -> str:
    """The chat template's source: ``chat_template.jinja``, else tokenizer_config.json's; "" when
    there is none.
    """
    own = path / "chat_template.jinja"
    if own.is_file() and own.stat().st_size <= MAX_JSON:
        return own.read_text(encoding="utf-8", errors="replace")
    if not (path / "tokenizer_config.json").is_file():
        return ""
    template = read_json(path / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next(
            (
                t.get("template")
                for t in template
                if isinstance(t, dict) and t.get("name") == "default"
            ),
            "",
        )
    return template if isinstance(template, str) else ""
