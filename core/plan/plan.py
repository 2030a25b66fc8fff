"""The plan: all decisions made before a weight is read. Plan zone: no torch.

A plan is frozen. Workers receive it as JSON (``plan.to_json``) and do not read the operator's
configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from glowplug.core.errors import ComponentFailed, GlowplugError, RequestError
from glowplug.core.facts.kv_layout import KVContext, KVEntries, KVEntry, KVLayout, local_heads
from glowplug.core.facts.mesh import axis_size
from glowplug.core.facts.model_facts import Facts
from glowplug.core.plugin.draft_costs import DraftCosts
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.loading import BUILT_IN, component_failure, describe

#: fields of ``EnginePlan`` whose key in the plan's JSON differs from their name
JSON_KEYS = {"expandable_segments": "growing_segments"}


@dataclass(frozen=True)
class Decision:
    """One decided value.

    Attributes:
        field: dotted path of the value.
        value: the value.
        by: origin of the decision: "operator", "default", "auto", a plugin's name or a pass.
        why: reason, one clause.
        notable: the brief table shows the decision, because the value was given or is not the
            default for such a machine.
    """

    field: str
    value: Any
    by: str
    why: str
    notable: bool = False


@dataclass(frozen=True)
class Choice:
    """The component chosen for a slot, with the data needed to build it in a worker.

    Attributes:
        slot: name of the slot.
        name: name of the component.
        factory: ``"package.module:Class"`` of the runtime object.
        options: the component's options as plain values.
        distribution: distribution that registered the component.
        version: version of the distribution.
        operational: names of the options that change how the engine runs and change no answer.
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
        """Slot, name and origin for messages, such as ``policy 'fcfs' (built in)``."""
        return f"{self.slot} {self.name!r} ({f'{self.distribution} {self.version}'.rstrip()})"


@dataclass(frozen=True)
class BudgetLine:
    """Estimated memory for one purpose on each rank; ranks compare it with measured memory.

    Attributes:
        name: name of the line.
        bytes: bytes on each rank; the largest number if ranks differ.
        how: basis of the estimate.
        ranks: bytes on each rank if they differ, else ().
        place: where the bytes are, if not in the memory of the rank's device, such as "disk".
    """

    name: str
    bytes: int
    how: str
    ranks: tuple[int, ...] = ()
    place: str = ""

    def on(self, rank: int) -> int:
        """Return the bytes on ``rank``."""
        return self.ranks[rank] if self.ranks else self.bytes


@dataclass(frozen=True)
class Sizes:
    """The sizes that the engine runs with, in tokens unless stated otherwise.

    With data-parallel attention, rows, queue, tokens of a step and pages are those of each group.
    """

    context_length: int  #: longest sequence, including prompt and output
    max_running: int  #: rows of the sequence table
    max_queued: int  #: most waiting requests
    max_step_tokens: int  #: most tokens in one step: chunk size and decoding rows
    chunk_size: int  #: most prefill tokens in one step
    page_size: int  #: tokens per page
    num_pages: int  #: pages of the KV pool, including the scratch page 0
    kv_bytes: int  #: bytes of the KV pool on each rank
    groups: int = 1  #: groups of ranks with requests of their own (data-parallel attention)
    width: int = 1  #: tokens per decoding row and step: 1 plus the drafted tokens
    draft_shape: DraftShape = DraftShape()  #: size of the drafts of a round
    draft_layers: int = 0  #: layers of the KV pool for a draft model, after the model's own
    #: the draft continues the target's hidden states, in layers of the pool or of a pool of its own
    draft_extends: bool = False
    #: sizes of drafts that a step may have, ascending by tokens; the last one is ``draft_shape``
    draft_shapes: tuple[DraftShape, ...] = ()
    #: positions after a step's tokens for which rows have pages, because the draft writes there
    lookahead: int = 0
    #: fewest pages with which the engine serves after memory was measured; 0: ``num_pages``
    least_pages: int = 0
    #: most pages of the pool if measured memory allows more than planned; 0: ``num_pages``
    most_pages: int = 0
    #: token counts, ascending, of forward passes with prompts that are captured in pieces
    pass_tokens: tuple[int, ...] = ()
    #: token counts, ascending, of the draft's pass over a step's tokens that are captured whole
    extend_tokens: tuple[int, ...] = ()
    #: token counts of steps that may hold more memory than larger ones
    peak_tokens: tuple[int, ...] = ()
    short_keys: int = 0  #: most keys of the short rows for which attention has a faster kernel
    tier_pages: int = 0  #: pages that a tier of the prefix cache holds on each rank; 0: no tier
    #: batch sizes, ascending, for which a second graph is captured with this kernel
    short_rows: tuple[int, ...] = ()

    @property
    def step_shapes(self) -> tuple[DraftShape, ...]:
        """Sizes of drafts that a step may have: ``draft_shapes``, or only ``draft_shape``."""
        if self.draft_shape.tokens != self.width:  # sizes made by hand, with a width only
            return self.draft_shapes or (DraftShape.chain(self.width - 1),)
        return self.draft_shapes or (self.draft_shape,)

    @property
    def max_admitted(self) -> int:
        """Most sequences that run and wait in all groups together."""
        return self.groups * (self.max_running + self.max_queued)

    @property
    def positions(self) -> int:
        """Number of positions that a row may use: the longest sequence, one step, and lookahead."""
        return self.context_length + self.width + self.lookahead


@dataclass(frozen=True)
class EnginePlan:
    """The frozen result of the six planning passes."""

    model: str  #: model as the operator named it
    dtype: str  #: compute dtype, by torch's name
    kv_dtype: str  #: dtype of the KV cache
    device: str  #: device type, "cuda" or "cpu"
    seed: int  #: seed from which requests without one get theirs
    overlap: bool  #: the next step is launched before the results of this one are read
    choices: tuple[Choice, ...]  #: chosen components of all slots
    decisions: tuple[Decision, ...]  #: all decided values, in the order of the table
    budget: tuple[BudgetLine, ...]  #: lines of the memory plan
    sizes: Sizes  #: sizes that the engine runs with
    mesh: dict[str, int]  #: mesh axis -> size; {} for one rank
    facts: Facts  #: facts of model, machine and packages
    config: dict[str, Any]  #: the operator's configuration, as given
    plugins: tuple[str, ...]  #: names of the loaded plugin modules, defaults first
    #: ``PluginSet.fingerprint``; ranks whose plugins have another one do not start
    plugin_fingerprint: str
    #: fingerprint of model, configuration and decisions (``fingerprint.plan_fingerprint``)
    fingerprint: str = ""
    hosts: int = 1  #: number of hosts; each has the same number of neighbouring ranks
    #: only those tokens of prompts go through the last layer that are sampled from
    sampled_last_layer: bool = False
    #: seconds of a step for each of ``Sizes.draft_shapes``, if given; None: measured at start-up
    draft_costs: DraftCosts | None = None
    #: torch's allocator uses expandable segments, unless its environment variable is set
    expandable_segments: bool = False
    #: components of a draft with attention of its own, in place of the target's; () without one
    draft_choices: tuple[Choice, ...] = ()
    #: weight source of the draft's folder; None: the model's
    draft_source: Choice | None = None
    #: tensors of the KV cache, as the attention backend's offers declare them
    kv_entries: tuple[KVEntry, ...] = ()
    draft_kv_entries: tuple[KVEntry, ...] = ()  #: those of a draft with attention of its own
    #: ``PolicyOffers.request_fields`` of the plan's policy
    request_fields: str = ""
    #: source of the chat template that replaces the tokenizer's; "" for the tokenizer's own
    chat_template: str = ""

    def choice(self, slot: str) -> Choice:
        """Return the first component in ``slot``.

        Raises:
            KeyError: the slot is empty.
        """
        for choice in self.choices:
            if choice.slot == slot:
                return choice
        raise KeyError(slot)

    def choices_in(self, slot: str) -> tuple[Choice, ...]:
        """Return all components in ``slot``."""
        return tuple(choice for choice in self.choices if choice.slot == slot)

    def of_draft(self) -> EnginePlan:
        """Return the plan of a draft with attention of its own, as its own model.

        The draft's KV cache has the compute dtype and the pages of the target's.
        """
        assert self.facts.draft is not None and self.draft_choices, "it has its own attention"
        slots = {choice.slot for choice in self.draft_choices}
        others = tuple(choice for choice in self.choices if choice.slot not in slots)
        return replace(
            self,
            choices=(*self.draft_choices, *others),
            draft_choices=(),
            facts=replace(self.facts, model=self.facts.draft, draft=None),
            kv_dtype=self.dtype,
            kv_entries=self.draft_kv_entries,
            draft_kv_entries=(),
        )

    @property
    def every_choice(self) -> tuple[Choice, ...]:
        """All chosen components, those of the draft last."""
        source = () if self.draft_source is None else (self.draft_source,)
        return (*self.choices, *self.draft_choices, *source)

    @property
    def whole_draft(self) -> bool:
        """The draft is a whole model."""
        return bool(self.draft_choices) and not self.sizes.draft_extends

    @property
    def local_kv_heads(self) -> int:
        """Number of key heads that each rank stores in its KV cache."""
        return local_heads(self.facts.model.num_kv_heads, axis_size("attn_tp", self.mesh))

    def kv_layout(self, entries: KVEntries, options: Any = None) -> KVLayout:
        """Return a rank's KV layout: the model's layers, then those of a draft in the same pool.

        Args:
            entries: the backend's ``AttentionOffers.kv_entries``.
            options: the backend's options.
        """
        model = self.facts.model
        layers = model.num_layers + self.sizes.draft_layers
        context = KVContext(model, self.kv_dtype, self.local_kv_heads, layers, options)
        return KVLayout(layers, self.sizes.page_size, entries(context))

    def title(self, slot: str) -> str:
        """Return the title of the first component in ``slot``; ``slot`` if it is empty."""
        held = self.choices_in(slot)
        return held[0].title if held else slot

    def failed_call(self, slot: str, method: str, error: Exception) -> ComponentFailed:
        """Return the error that ends the request for which a component's call has failed.

        Args:
            slot: slot of the component.
            method: name of the method that was called.
            error: the exception.

        Returns:
            ``error`` if it is a ComponentFailed, else one with the component, its distribution and
            version, the phase and the exception.

        Raises:
            GlowplugError: ``error`` is an error of the engine that concerns more than a request,
                such as a failed exchange.
        """
        if isinstance(error, ComponentFailed):
            return error
        if isinstance(error, GlowplugError) and not isinstance(error, RequestError):
            raise error
        held = self.choices_in(slot)
        named = (
            (held[0].name, held[0].distribution, held[0].version) if held else (slot, BUILT_IN, "")
        )
        text = component_failure(slot, *named, f"serve, in {method}", describe(error))
        return ComponentFailed(text)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        size = 1
        for axis in ("tp", "pp"):
            size *= self.mesh.get(axis, 1)
        return max(size, self.mesh.get("world", 1))

    def to_json(self) -> bytes:
        """Return the plan as JSON."""
        values = {
            JSON_KEYS.get(field.name, field.name): getattr(self, field.name)
            for field in fields(self)
        }
        return msgspec.json.encode(values)

    @staticmethod
    def from_json(data: bytes) -> EnginePlan:
        """Return the plan that ``to_json`` wrote."""
        values = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        for name, key in JSON_KEYS.items():
            values[name] = values.pop(key)
        return msgspec.json.decode(msgspec.json.encode(values), type=EnginePlan)
