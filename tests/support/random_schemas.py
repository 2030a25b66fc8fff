"""Random JSON schemas: nested objects, enums, bounded numbers, arrays, optional keys, unions."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("red", "blue", "on", "off", "north", "a b", 'q"q', "é", "x/y", "", "10", "null")
KEYS = ("id", "name", "kind", "size", "tags", "left", "right", "note", "on", "v1")
DEEPEST = 3


def random_schema(seed: int) -> dict[str, Any]:
    """Return an object schema that only depends on ``seed``."""
    return _object(random.Random(seed), 0)


def _object(dice: random.Random, depth: int) -> dict[str, Any]:
    keys = dice.sample(KEYS, dice.randint(1, 4))
    required = [key for key in keys if dice.random() < 0.6] or keys[:1]
    schema = {
        "type": "object",
        "properties": {key: _value(dice, depth + 1) for key in keys},
        "required": required,
    }
    if dice.random() < 0.9:
        schema["additionalProperties"] = False
    return schema


def _value(dice: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_text, _enum, _integer, _number, _plain]
    if depth < DEEPEST:
        kinds += [_object, _array, _union]
    made: dict[str, Any] = dice.choice(kinds)(dice, depth)
    return made


def _text(dice: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "maxLength": dice.randint(1, 12)}
    if dice.random() < 0.3:
        schema["minLength"] = dice.randint(0, schema["maxLength"])
    if dice.random() < 0.3:
        return {
            "type": "string",
            "pattern": dice.choice(["^[a-z]{1,5}$", "^(ab|c)+d?$", "^A-\\d$"]),
        }
    return schema


def _enum(dice: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = dice.sample(WORDS, dice.randint(1, 5))
    if dice.random() < 0.4:
        values += [dice.randint(-50, 50), True, None, 1.5][: dice.randint(1, 4)]
    return {"const": values[0]} if len(values) == 1 else {"enum": values}


def _integer(dice: random.Random, depth: int) -> dict[str, Any]:
    low = dice.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + dice.choice([0, 1, 7, 250, 99999])}


def _number(dice: random.Random, depth: int) -> dict[str, Any]:
    low = round(dice.uniform(-100, 100), dice.randint(0, 2))
    if dice.random() < 0.5:
        return {"type": "number", "minimum": low, "maximum": low + dice.choice([0.5, 3, 1000])}
    return {"type": "number", "exclusiveMinimum": low}


def _plain(dice: random.Random, depth: int) -> dict[str, Any]:
    return {"type": dice.choice(["boolean", "null", ["integer", "null"], ["boolean", "string"]])}


def _array(dice: random.Random, depth: int) -> dict[str, Any]:
    least = dice.randint(0, 2)
    return {
        "type": "array",
        "items": _value(dice, depth + 1),
        "minItems": least,
        "maxItems": least + dice.randint(0, 3),
    }


def _union(dice: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(dice, depth + 1) for _ in range(dice.randint(2, 3))]}
