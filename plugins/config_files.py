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
MAX_DEPTH = 32  #: deepest nesting of a YAML file
#: the data and the line of every key, by dotted path
Read = tuple[dict[str, Any], dict[str, int]]


@hookimpl(trylast=True)
def read_config_file(path: Path) -> Read | None:
    """Return the content of a TOML, YAML or JSON file and the line of each key.

    Return None for other files.
    """
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
    """Return the error for a configuration file that cannot be parsed.

    ``line``: line of the fault; 0 if unknown.
    """
    where = f"{path.name}:{line}" if line else path.name
    return ConfigError(
        [Refusal("config", "--config", f"{where}: {message}", "correct the file")], path.name
    )


def without_duplicates(path: Path, duplicates: list[tuple[str, int]], read: Read) -> Read:
    """Return ``read``, or raise a ConfigError if a key occurs twice.

    Args:
        path: the file.
        duplicates: (dotted key, line) of every duplicate.
        read: the data and lines read from the file.

    Raises:
        ConfigError: some keys occur twice; the error names each of them and contains ``read``, so
            that the rest of the file is checked too.
    """
    if not duplicates:
        return read
    raise ConfigError(
        [
            Refusal(
                "config", key, f"{path.name}:{line}: the key is written twice", "keep one of them"
            )
            for key, line in duplicates
        ],
        path.name,
        read,
    )


def read_toml(path: Path, text: str) -> Read:
    """Return the content of a TOML text and the line of each key."""
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
    """Return the content of a JSON text and the line of each key."""
    import json

    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise syntax_error(
            path, getattr(error, "lineno", 0), getattr(error, "msg", str(error))
        ) from None
    lines, duplicates = json_lines(text)
    return without_duplicates(path, duplicates, (data, lines))


def read_yaml(path: Path, text: str) -> Read:
    """Return the content of a YAML text and the line of each key."""
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        keys = _YamlKeys()
        keys.walk(node)
        data = loader.construct_document(node) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 0
        raise syntax_error(path, line, error.problem or str(error)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise syntax_error(path, 0, str(error)) from None
    finally:
        loader.dispose()
    return without_duplicates(path, keys.duplicates, (data, keys.lines))


class _YamlKeys:
    """The keys of a YAML document, with their lines and duplicates.

    Attributes:
        lines: line of each key, by dotted path.
        duplicates: (dotted path, line) of every repetition of a key within its mapping.
    """

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.duplicates: list[tuple[str, int]] = []

    def walk(self, node: Any, path: str = "", depth: int = 0) -> None:
        """Record every key below ``node``.

        Args:
            node: the YAML node.
            path: its dotted path.
            depth: its nesting depth.

        Raises:
            ValueError: the document has too many keys or is nested too deeply.
        """
        import yaml

        if depth > MAX_DEPTH or len(self.lines) > MAX_KEYS:
            raise ValueError(
                f"more than {MAX_KEYS} keys, or sections nested more than {MAX_DEPTH} deep"
            )
        if isinstance(node, yaml.MappingNode):
            self._walk_mapping(node, path, depth)
        elif isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                name = f"{path}.{number}"
                self.lines[name] = item.start_mark.line + 1
                self.walk(item, name, depth + 1)

    def _walk_mapping(self, node: Any, path: str, depth: int) -> None:
        seen = set()
        for key, value in node.value:
            name = f"{path}.{key.value}" if path else str(key.value)
            line = key.start_mark.line + 1
            if key.value in seen:
                self.duplicates.append((name, line))
            seen.add(key.value)
            self.lines[name] = line
            self.walk(value, name, depth + 1)
