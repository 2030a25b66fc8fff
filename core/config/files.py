"""Configuration files and overrides: a nested dict with the origin of each value. No torch.

File formats are plugins (hook ``read_config_file``). The command line takes precedence over the
file; list items with the same ``use`` are merged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glowplug.core.errors import ConfigError, Refusal
from glowplug.core.plugin.component import Options
from glowplug.core.plugin.options import OPTION_BASES

if TYPE_CHECKING:
    from glowplug.core.plugin.registry import PluginSet

MAX_BYTES = 4 << 20  #: size limit of a configuration file
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass
class Layer:
    """Configuration values from one source.

    Attributes:
        data: the values, a nested dict.
        origins: origin of each value by dotted path.
        refusals: refusals found while the values were read.
        replaced: (path, value, reason) of each option without effect, because another layer
            chose another component.
    """

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    replaced: list[tuple[str, Any, str]] = field(default_factory=list)


def read_config(path: Path, plugins: PluginSet) -> Layer:
    """Read a configuration file; smaller faults are in ``refusals`` of the result.

    Raises:
        ConfigError: nothing in the file can be used.
    """
    name = path.name
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _unusable(
            name,
            f"{path} could not be read: {error.strerror}",
            "give the path of a file that exists",
        ) from None
    if size > MAX_BYTES or not path.is_file():
        raise _unusable(
            name, f"{path} is not a configuration file", f"a file of at most {MAX_BYTES >> 20} MiB"
        )
    data, lines, refusals = _parsed_file(path, plugins)
    if not isinstance(data, dict):
        raise _unusable(
            name,
            f"the file holds a {type(data).__name__}, expected keys and sections",
            'start with model = "embedded"',
        )
    layer = Layer(data, {key: f"{name}:{line}" for key, line in lines.items()}, refusals)
    layer.data = _variables(data, "", layer)
    return layer


def _parsed_file(
    path: Path, plugins: PluginSet
) -> tuple[dict[str, Any], dict[str, int], list[Refusal]]:
    """Return the content of a file, the line of each dotted path, and refusals.

    Raises:
        ConfigError: no plugin reads the file, or nothing in it can be used.
    """
    try:
        found: tuple[dict[str, Any], dict[str, int]] | None = plugins.hook.read_config_file(
            path=path
        )
    except ConfigError as error:
        if error.parsed is None:
            raise
        return *error.parsed, list(error.refusals)
    if found is None:
        raise _unusable(
            path.name,
            f"no plugin reads {path.suffix or path.name!r} files",
            "a .toml, .yaml or .json file",
        )
    return *found, []


def _unusable(name: str, reason: str, fix: str) -> ConfigError:
    """Return the error for a file of which nothing can be used."""
    return ConfigError([Refusal("config", "--config", reason, fix)], name)


def _variables(value: Any, path: str, layer: Layer) -> Any:
    """Return ``value`` with texts ``"${NAME}"`` replaced by environment variables.

    API keys can thus stay out of the file. An unset variable becomes a refusal in ``layer``.
    """
    if isinstance(value, Mapping):
        return {
            key: _variables(item, f"{path}.{key}" if path else str(key), layer)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_variables(item, f"{path}.{number}", layer) for number, item in enumerate(value)]
    match = _VARIABLE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    name = match[1]
    if name not in os.environ:
        where = layer.origins.get(path, "")
        layer.refusals.append(
            Refusal(
                "config",
                path,
                f"{where}: the environment variable {name} is not set",
                f"set {name}, or write the value",
            )
        )
        return value
    return os.environ[name]


# ---- dotted paths --------------------------------------------------------------------------------


def set_path(data: dict[str, Any], path: str, value: Any) -> None:
    """Set a value by its dotted path, such as ``a.b.c``.

    Numbers index lists; the index after the last item appends.

    Raises:
        ValueError: ``path`` is not a dotted path, or leads through a value that is not a section.
    """
    holder: Any = data
    parts = path.split(".")
    if not all(parts):
        raise ValueError(f"{path!r} is not a dotted path")
    for part, following in zip(parts[:-1], parts[1:]):
        empty: Any = [] if following.isdigit() else {}
        holder = _step(holder, part, empty, path)
    _store(holder, parts[-1], value, path)


def _step(holder: Any, part: str, empty: Any, path: str) -> Any:
    """Return the section or list at key ``part`` of ``holder``; if missing, add ``empty`` there."""
    if isinstance(holder, list) and part.isdigit() and int(part) <= len(holder):
        if int(part) == len(holder):
            holder.append(empty)
        return holder[int(part)]
    if isinstance(holder, dict):
        return holder.setdefault(part, empty)
    raise ValueError(f"{path!r} goes through {part!r}, which is not a section")


def _store(holder: Any, part: str, value: Any, path: str) -> None:
    if isinstance(holder, list) and part.isdigit() and int(part) <= len(holder):
        holder[int(part) : int(part) + 1] = [value]
    elif isinstance(holder, dict):
        holder[part] = value
    else:
        raise ValueError(f"{path!r} goes through something that is not a section")


def merge(over: Layer, under: Layer) -> Layer:
    """Return both layers merged key by key; ``over`` takes precedence.

    Lists of sections are merged by ``use``; other lists are replaced.
    """
    merged = Layer(dict(under.data), dict(under.origins), [*under.refusals, *over.refusals])
    for key, value in over.data.items():
        merged.replaced += _replaced(key, value, merged.data.get(key), over, under)
        merged.data[key] = _merge(value, merged.data.get(key), key, over, merged)
    for path, _, _ in merged.replaced:
        merged.origins.pop(path, None)
    for path, place in over.origins.items():
        if path.partition(".")[0] not in LISTS:
            merged.origins[path] = place
    return merged


LISTS = frozenset({"parallel", "outputs"})  #: lists of sections, each of a component


def _replaced(
    section: str, value: Any, below: Any, over: Layer, under: Layer
) -> list[tuple[str, Any, str]]:
    """Return the options that lose their effect because another layer chooses another component.

    Args:
        section: path of the section.
        value: the section in ``over``, with its ``use``.
        below: the section in ``under``, with the options.
        over: the layer that takes precedence.
        under: the other layer.

    Returns:
        (path, value, reason) of each option. The reason states where the option and the ``use`` in
            ``over`` were given.
    """
    if (
        not isinstance(value, dict)
        or not isinstance(below, dict)
        or "use" not in value
        or "use" not in below
    ):
        return []
    if value["use"] == below["use"]:
        return []
    source = over.origins.get(f"{section}.use", f"{section}.use")
    paths = {
        key: f"{section}.{key}" for key in below if key not in value and key not in _common(section)
    }
    return [
        (
            path,
            below[key],
            f"{under.origins.get(path, 'given')}; no effect: {source} replaces {below['use']}",
        )
        for key, path in paths.items()
    ]


def _common(section: str) -> frozenset[str]:
    """Return the names of the options that all components of a section have."""
    return frozenset(OPTION_BASES.get(section, Options).model_fields)


def _merge(value: Any, below: Any, path: str, over: Layer, merged: Layer) -> Any:
    if path in LISTS and isinstance(value, list):
        return _merge_list(value, below if isinstance(below, list) else [], path, over, merged)
    if isinstance(value, dict) and isinstance(below, dict):
        joined = dict(below)
        for key, item in value.items():
            joined[key] = _merge(item, below.get(key), f"{path}.{key}", over, merged)
        # NOTE: a component's own options do not apply to the component that replaces it on the
        # command line.
        if "use" in value and below.get("use", value["use"]) != value["use"]:
            joined = {
                key: item for key, item in joined.items() if key in value or key in _common(path)
            }
        return joined
    return value


def _merge_list(
    value: list[Any], below: list[Any], path: str, over: Layer, merged: Layer
) -> list[Any]:
    joined = list(below)
    for number, item in enumerate(value):
        use = item.get("use") if isinstance(item, dict) else None
        at = next(
            (
                i
                for i, old in enumerate(joined)
                if isinstance(old, dict) and use and old.get("use") == use
            ),
            None,
        )
        if at is None:
            at = len(joined)
            joined.append(item)
        else:
            joined[at] = {**joined[at], **item}
        for old, place in over.origins.items():
            if old == f"{path}.{number}" or old.startswith(f"{path}.{number}."):
                merged.origins[f"{path}.{at}{old[len(f'{path}.{number}') :]}"] = place
    return joined
