"""Facts of a model folder in the Hugging Face layout. No torch.

They are read from config.json, safetensors headers and the chat template. No weight is mapped, and
no code from the folder is run. Errors are FactsError (config.json) and WeightError (headers).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from glowplug.core.errors import FactsError
from glowplug.core.facts.hub_cache import HUB_ID, hub_snapshot
from glowplug.core.facts.model_facts import ModelFacts, TensorFact
from glowplug.core.facts.safetensors_header import read_tensors
from glowplug.core.facts.weight_classes import LAYER_PREFIX, next_token_layer

EMBEDDED = "embedded"  #: name of the model that is part of glowplug
MAX_JSON = 64 << 20  #: size limit in bytes of config.json and tokenizer_config.json
SAMPLES = 256  #: samples that are read from a checkpoint for its digest
FEWEST_SAMPLES = 2  #: least number of samples from each file
SAMPLE_BYTES = 4096  #: size of a sample

#: function that returns config.json with the defaults of keys that it may lack
Normalise = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class ArchitectureRules:
    """Declarations of model families that are needed to read config.json.

    Attributes:
        normalise: architecture -> ``ModelOffers.normalise``, for families that declare it.
        drafts: architectures of folders that hold only next-token layers.
        prefixes: architecture -> ``ModelOffers.layer_prefix``.
    """

    normalise: Mapping[str, Normalise] = field(default_factory=dict)
    drafts: frozenset[str] = frozenset()
    prefixes: Mapping[str, str] = field(default_factory=dict)


NO_RULES = ArchitectureRules()


def embedded_path() -> Path:
    """Return the folder of the embedded model."""
    return Path(__file__).absolute().parents[2] / "models" / "embedded" / "checkpoint"


def locate_model(name: str, revision: str | None = None) -> str:
    """Return the path of the folder or file that ``model = name`` refers to; download nothing.

    Args:
        name: "embedded", a path, or a hub id that is already downloaded.
        revision: branch, tag or commit of a hub id; None: the default branch.

    Raises:
        FactsError: there is no such folder, file or downloaded model, or its files are incomplete.
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
    cached = hub_snapshot(name, revision)
    if cached is not None:
        return str(cached)
    fix = f'write a folder that exists, "{EMBEDDED}" for the shipped model'
    if HUB_ID.fullmatch(name):
        fix += f", or download it first: glowplug download {name}"
    raise FactsError(f"no folder or file {name!r}, and no downloaded model of that name", fix)


def read_folder(path: Path, rules: ArchitectureRules = NO_RULES) -> ModelFacts | None:
    """Return the facts of the model folder at ``path``; None if it has no config.json.

    Args:
        path: the folder.
        rules: what model families declare about their architectures.
    """
    if not (path / "config.json").is_file():
        return None
    return model_facts(
        normalise(read_json(path / "config.json"), rules),
        path=str(path),
        tensors=read_tensors(path),
        chat_template=read_chat_template(path),
        rules=rules,
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        FactsError: the file cannot be read, is too large, or holds no JSON object.
    """
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


def normalise(config: dict[str, Any], rules: ArchitectureRules = NO_RULES) -> dict[str, Any]:
    """Return a copy of config.json in which settings have the keys of published checkpoints.

    These are ``rope_theta``, ``rope_scaling`` (with both ``type`` and ``rope_type``; None for plain
    rotary embeddings) and ``torch_dtype``. The model family's own defaults are filled in last.

    Args:
        config: content of config.json, which is not changed.
        rules: what model families declare about their architectures.
    """
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
    own = rules.normalise.get(_architecture(config))
    return own(config) if own is not None else config


def _architecture(config: dict[str, Any]) -> str:
    """Return the first entry of ``architectures``; "" if there is none."""
    stated = config.get("architectures")
    found = stated[0] if isinstance(stated, list) and stated else ""
    return found if isinstance(found, str) else ""


def model_facts(
    config: dict[str, Any],
    *,
    path: str = "",
    tensors: dict[str, TensorFact] | None = None,
    chat_template: str = "",
    format: str = "",
    rules: ArchitectureRules = NO_RULES,
) -> ModelFacts:
    """Return the facts of a model from its normalised config.json.

    Args:
        config: config.json, as ``normalise`` returns it.
        path: folder or file that was read.
        tensors: tensors of the checkpoint by name.
        chat_template: source of the chat template.
        format: format of the weights; "" for safetensors, or "none" without tensors.
        rules: what model families declare about their architectures.

    Raises:
        FactsError: a key is missing or has a wrong type; the message names the first such key.
    """
    tensors = tensors or {}
    integer = _Reader(config, path)
    architecture = _architecture(config)
    if not architecture:
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
    if architecture in rules.drafts:
        config = {**config, "num_nextn_predict_layers": layers}
        layers = 0
    prefix = rules.prefixes.get(architecture, LAYER_PREFIX)
    nextn, notes = _nextn(config, layers, tensors, prefix)
    return ModelFacts(
        path=path,
        architecture=architecture,
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
    """A reader of whole numbers in config.json, which must be positive if they have no default."""

    def __init__(self, config: dict[str, Any], path: str) -> None:
        self.config = config
        self.path = path

    def __call__(self, key: str, default: int | None = None) -> int:
        """Return the number at ``key``, or ``default`` if the key is missing.

        Raises:
            FactsError: the key is missing without a default, or does not hold such a number.
        """
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
    """Check and return the value of ``weight_block_size``; None if config.json has none."""
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
    config: dict[str, Any], layers: int, tensors: dict[str, TensorFact], prefix: str
) -> tuple[int, tuple[str, ...]]:
    """Return the number of multi-token-prediction layers, and remarks on them for the plan.

    If the tensors are known, the layers after the last regular one are counted. Otherwise the
    number is the one in config.json.

    Args:
        prefix: beginning of the names of layers' tensors.
    """
    stated = config.get("num_nextn_predict_layers") or 0
    if not tensors:
        return int(stated), ()
    numbers = (next_token_layer(name, layers, prefix) for name in tensors)
    beyond = {number for number in numbers if number >= 0}
    if stated and not beyond:
        return 0, (f"config.json states {stated} next-token layers, the checkpoint holds none",)
    return len(beyond), ()


def with_digest(facts: ModelFacts) -> ModelFacts:
    """Return ``facts`` with the digest of their weights.

    ``facts`` without tensors, or already with a digest, are returned unchanged. The digest covers
    names, dtypes and shapes of all tensors, the size of each file that holds tensors, and samples
    of its bytes. Checkpoints of the same shape thus have different digests if their weights differ.
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
    """Call ``update`` with a file's size and ``count`` samples, evenly spaced up to its end."""
    size = file.stat().st_size
    update(size.to_bytes(8, "little"))
    with open(file, "rb", buffering=0) as stream:
        for number in range(1, count + 1):
            stream.seek(max(0, size * number // count - SAMPLE_BYTES))
            update(stream.read(SAMPLE_BYTES))


def read_chat_template(path: Path) -> str:
    """Return the source of a model folder's chat template; "" if it has none.

    ``chat_template.jinja`` takes precedence over tokenizer_config.json.
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
