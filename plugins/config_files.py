"""Readers of configuration files in TOML, YAML and JSON, with the line number of every key.

Duplicate keys are errors in all three formats.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from glowplug.core.errors import ConfigError, Refusal
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.plugins.config_lines import json_lines, toml_lines

MAX_KEYS = 10_000  #: most keys of a YAML file, with its aliases expanded
#: the data and the line of every key, by dotted path
Read = tuple[dict[str, Any], dict[str, int]]


@hookimpl(trylast=True)
def read_config_file(path: Path) -> Read | None:
    reader = {".toml": read_toml, ".yaml": read_yaml, ".yml": read_yaml, ".json": read_json}.get(
        path.suffix.lower()
    )
    if reader is None:
        return None
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise syntax_error(
            path, 0, f"not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    return reader(path, text)


def syntax_error(path: Path, line: int, message: str) -> ConfigError:
    where = f"{path.name}:{line}" if line else path.name
    return ConfigError(
        [Refusal("config", "--config", f"{where}: {message}", "correct the file")], path.name
    )


def duplicates(path: Path, found: list[tuple[str, int]], read: Read) -> Read:
    """Return ``read`` if no key is duplicated.

    Args:
        path: the file.
        found: (dotted key, line) of every duplicate.
        read: the data and lines read from the file.

    Raises:
        ConfigError: some keys are duplicated; it names each of them, and it contains ``read``, so
            that the rest of the file is checked too.
    """
    if not found:
        return read
    raise ConfigError(
        [
            Refusal(
                "config", key, f"{path.name}:{line}: the key is written twice", "keep one of them"
            )
            for key, line in found
        ],
        path.name,
        read,
    )


def read_toml(path: Path, text: str) -> Read:
    import tomllib

    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        match = re.search(r"\(at line (\d+), column \d+\)", message)
        line = int(match[1]) if match else text.count("\n") + 1  # "at end of document"
        raise syntax_error(path, line, message.partition(" (at ")[0]) from None
    return data, toml_lines(text)


def read_json(path: Path, text: str) -> Read:
    import json

    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise syntax_error(
            path, getattr(error, "lineno", 0), getattr(error, "msg", str(error))
        ) from None
    lines, twice = json_lines(text)
    return duplicates(path, twice, (data, lines))


def read_yaml(path: Path, text: str) -> Read:
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        twice: list[tuple[str, int]] = []
        _walk(node, "", lines, twice, 0)
        data = loader.construct_document(node) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 0
        raise syntax_error(path, line, error.problem or str(error)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise syntax_error(path, 0, str(error)) from None
    finally:
        loader.dispose()
    return duplicates(path, twice, (data, lines))


def _walk(
    node: Any, path: str, lines: dict[str, int], twice: list[tuple[str, int]], depth: int
) -> None:
    """Record the line of every key below ``node`` and the duplicate keys.

    Args:
        node: the YAML node.
        path: its dotted path.
        lines: line by dotted path; filled here.
        twice: (dotted path, line) of every duplicate key; filled here.
        depth: nesting depth of ``node``.

    Raises:
        ValueError: the document has too many keys or is nested too deeply.
    """
    import yaml

    if depth > 32 or len(lines) > MAX_KEYS:
        raise ValueError(f"more than {MAX_KEYS} keys, or sections nested more than 32 deep")
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            name = f"{path}.{key.value}" if path else str(key.value)
            if key.value in seen:
                twice.append((name, key.start_mark.line + 1))
            seen.add(key.value)
            lines[name] = key.start_mark.line + 1
            _walk(value, name, lines, twice, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            name = f"{path}.{number}"
            lines[name] = item.start_mark.line + 1
            _walk(item, name, lines, twice, depth + 1)
