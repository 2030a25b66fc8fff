"""The plan: everything that was decided before a weight is read. Frozen, torch-free, JSON both
ways.

Workers receive it as JSON (``plan.to_json``) and never look at the operator's config again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from glowplug.core.facts.model_facts import Facts


@dataclass(frozen=True)
class Decision:
    """One decided value.

    Attributes:
        by: "operator", "default", "auto", a plugin's name or a pass.
        why: one clause.
        notable: not what the defaults come to on such a machine, so that the brief table shows it;
            what was given always is.
    """

    field: str
    value: Any
    by: str
    why: str
    notable: bool = False


@dataclass(frozen=True)
class Choice:
    """The component that fills a slot: enough to build it in a worker.

    ``operational``: names of its options that change how the engine runs and no answer.
    """

    slot: str
    name: str
    factory: str
    options: dict[str, Any]
    distribution: str = "built in"
    version: str = ""
    operational: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Slot, name and origin for messages: ``policy 'fcfs' (built in)``."""
        return f"{self.slot} {self.name!r} ({f'{self.distribution} {self.version}'.rstrip()})"


@dataclass(frozen=True)
class BudgetLine:
    """Bytes set aside on each rank under one name: an estimate, which a rank compares with what it
    measures.

    ``ranks``: bytes on each rank where they differ, and then ``bytes`` is the most of any; () where
    they are the same.
    """

    name: str
    bytes: int
    how: str
    ranks: tuple[int, ...] = ()

    def on(self, rank: int) -> int:
        return self.ranks[rank] if self.ranks else self.bytes


@dataclass(frozen=True)
class Sizes:
    """Numbers every run-zone part reads. Tokens unless said otherwise; bytes where the name says
    so.
    """

    context_length: int  #: longest sequence, prompt and output together
    max_running: int  #: rows of the sequence table
    max_queued: int  #: waiting requests beyond the running ones
    max_step_tokens: int  #: most tokens in one step (chunk size plus decoding rows)
    chunk_size: int  #: most prefill tokens in one step
    page_size: int
    num_pages: int  #: pages of the KV pool, the scratch page 0 included
    kv_bytes: int  #: bytes of the KV pool on each rank
    width: int = 1  #: tokens a decoding row computes a step (1 + drafted)
    draft_layers: int = 0  #: layers of the KV pool behind the model's own, for a draft model
    #: tokens behind a step's own for which a row has cache pages, because a draft writes there
    lookahead: int = 0
    least_pages: int = (
        0  #: with fewer pages, once memory has been measured, nothing is served; 0: ``num_pages``
    )
    most_pages: int = (
        0  #: what the pool grows to where memory is measured to be left; 0: ``num_pages``
    )
    pass_tokens: tuple[
        int, ...
    ] = ()  #: token counts, ascending, whose passes over prompts are captured in pieces
    extend_tokens: tuple[
        int, ...
    ] = ()  #: the same of a draft's pass over a step's tokens, captured whole
    turns: tuple[int, ...] = ()  #: token counts of steps that may hold more than larger ones
    short_keys: int = 0  #: of rows that attention decodes otherwise where no row is longer,
    short_rows: tuple[
        int, ...
    ] = ()  #: and batch sizes, ascending, that are captured for such rows as well

    @property
    def positions(self) -> int:
        """Positions that a row may touch: the longest sequence, a step launched at its end, and
        drafts behind that.
        """
        return self.context_length + self.width + self.lookahead


@dataclass(frozen=True)
class EnginePlan:
    """The frozen outcome of the six passes."""

    model: str
    dtype: str
    kv_dtype: str
    device: str
    seed: int
    overlap: bool
    choices: tuple[Choice, ...]
    decisions: tuple[Decision, ...]
    budget: tuple[BudgetLine, ...]
    sizes: Sizes
    mesh: dict[str, int]  #: axis -> size; {} for one rank
    facts: Facts
    config: dict[str, Any]  #: the operator's own configuration, as given
    plugins: tuple[str, ...]  #: names of the loaded plugin modules, defaults first
    #: of the plugin set (``PluginSet.fingerprint``); ranks with another one refuse to start
    plugin_fingerprint: str
    fingerprint: str = (
        ""  #: of model, configuration and decisions (``fingerprint.plan_fingerprint``)
    )
    hosts: int = 1  #: hosts that carry the ranks: neighbours together, in equal numbers
    sampled_last_layer: bool = (
        False  #: prompts go through the last layer with their sampled tokens alone
    )
    growing_segments: bool = (
        False  #: ranks have torch's allocator grow its segments, unless its own variable is set
    )
    chat_template: str = (
        ""  #: source of the template that replaces the tokenizer's; "": the tokenizer's own
    )

    def choice(self, slot: str) -> Choice:
        """The single component in ``slot``. Raises KeyError when the slot is empty."""
        for choice in self.choices:
            if choice.slot == slot:
                return choice
        raise KeyError(slot)

    def choices_in(self, slot: str) -> tuple[Choice, ...]:
        return tuple(choice for choice in self.choices if choice.slot == slot)

    def title(self, slot: str) -> str:
        """The single component in ``slot`` for messages; the slot's name where the plan holds none."""
        held = self.choices_in(slot)
        return held[0].title if held else slot

    @property
    def ranks(self) -> int:
        size = 1
        for axis in ("tp", "pp"):
            size *= self.mesh.get(axis, 1)
        return max(size, self.mesh.get("world", 1))

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> EnginePlan:
        return msgspec.json.decode(data, type=EnginePlan)
