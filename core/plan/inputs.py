"""Passes one and two: the parsed configuration, and the facts. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from glowplug.core.config.parse import Contributor, Parsed, parse
from glowplug.core.errors import FactsError, Refusal, WeightError
from glowplug.core.facts.machine import this_machine
from glowplug.core.facts.model_facts import Facts, HardwareFacts
from glowplug.core.facts.weight_classes import Tally
from glowplug.core.plan.plan import Decision
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.model_reading import ModelReading
from glowplug.core.plugin.registry import PluginSet

CALLER = "entry point"  #: contributor of the defaults of a command or of ``LLM(...)``


@dataclass(frozen=True)
class Inputs:
    """The parsed configuration and the facts.

    Attributes:
        parsed: the parsed configuration.
        facts: the facts; None if those of the model could not be read.
        elements: element counts of the checkpoint by kind (``weight_classes.Tally``).
        draft_elements: element counts of the draft model's own folder.
        refusals: refusals found while the model, the draft and the chat template were read.
    """

    parsed: Parsed
    facts: Facts | None
    elements: Tally
    draft_elements: Tally
    refusals: Sequence[Refusal]


def read_inputs(
    config: Mapping[str, Any],
    plugins: PluginSet,
    hardware: HardwareFacts | None,
    contributed: Mapping[str, Any],
    origins: Mapping[str, str],
) -> Inputs:
    """Return the parsed configuration and the facts; mistakes become refusals in the result.

    Plugins contribute defaults by the model's facts, so these facts are read before the
    configuration is parsed. The chat template, the draft and the number of hosts are then taken
    from the parsed configuration.

    Args:
        config: nested dict with one key per section.
        hardware: facts of a sheet; None for this machine.
        contributed: the caller's own defaults by dotted path.
        origins: origin of the operator's values by dotted path.
    """
    refusals: list[Refusal] = []
    reading = _read_model(config, contributed, plugins, refusals)
    facts = _facts(reading, hardware, plugins)
    facts = _with_template(facts, config.get("chat_template"), refusals)
    defaults = _contributions(plugins, facts, contributed)
    parsed = parse(config, plugins, defaults, origins)
    if "chat_template" not in config:  # it may be contributed
        facts = _with_template(facts, parsed.config.chat_template, refusals)
    if facts is None or reading is None:
        return Inputs(parsed, None, {}, {}, refusals)
    draft = _read_draft(parsed, facts, plugins, refusals)
    hosts = hardware.hosts if hardware else parsed.config.executor.hosts or 1
    facts = _complete(facts, draft, hosts)
    return Inputs(parsed, facts, reading.elements, draft.elements if draft else {}, refusals)


# ---- facts ---------------------------------------------------------------------------------------


def _facts(
    reading: ModelReading | None, hardware: HardwareFacts | None, plugins: PluginSet
) -> Facts | None:
    """Return the facts of the model and of ``hardware``, with the packages of that machine.

    If a sheet states packages, built-in components can use no others. If the sheet leaves them
    out, two kinds of packages are taken from this environment: torch, which every installation
    has, and packages that only third-party plugins need.

    NOTE: another machine has its own build of torch, whose CUDA version is not known here.

    Args:
        hardware: facts of a sheet; None for this machine.
    """
    if reading is None:
        return None
    here = plugins.software
    packages = dict(here.packages)
    if hardware is not None and "torch" in packages:
        packages["torch"] = packages["torch"].partition("+cpu")[0]
    if hardware is not None and hardware.packages is not None:
        kept = {"torch", *plugins.third_party_packages}
        packages = {
            name: version for name, version in packages.items() if name in kept
        } | hardware.packages
        packages = {name: version for name, version in packages.items() if version}
    return Facts(reading.facts, hardware or this_machine(), replace(here, packages=packages))


def _complete(facts: Facts, draft: ModelReading | None, hosts: int) -> Facts:
    """Return ``facts`` with the draft model's facts and the number of (equal) hosts."""
    hardware = facts.hardware
    if hardware.hosts != hosts:
        hardware = replace(hardware, hosts=hosts)
    return replace(facts, hardware=hardware, draft=draft.facts if draft is not None else None)


def _with_template(facts: Facts | None, given: object, refusals: list[Refusal]) -> Facts | None:
    """Return ``facts`` with the chat template ``given``, if any, instead of the model's.

    A template that cannot be read is added to ``refusals``.
    """
    if isinstance(given, PurePath):
        given = str(given)
    if facts is None or not isinstance(given, str) or not given:
        return facts
    from glowplug.core.text.chat_template import read_template

    try:
        return replace(facts, model=replace(facts.model, chat_template=read_template(given)))
    except FactsError as error:
        refusals.append(Refusal("facts", "chat_template", str(error), error.fix))
        return facts


def _read_model(
    config: Mapping[str, Any],
    contributed: Mapping[str, Any],
    plugins: PluginSet,
    refusals: list[Refusal],
) -> ModelReading | None:
    """Return the facts of the model; None if no model is given or reading it fails.

    A failure is added to ``refusals``.
    """
    name = config.get("model", contributed.get("model"))
    revision = config.get("revision")
    if isinstance(name, PurePath):
        name = str(name)
    if not isinstance(name, str) or not name:
        return None
    try:
        return plugins.read_model(name, revision if isinstance(revision, str) else None)
    except FactsError as error:
        refusals.append(Refusal("facts", "model", str(error), error.fix or "another model folder"))
    except WeightError as error:
        refusals.append(
            Refusal("facts", "model", str(error), "download the files again, or another folder")
        )
    return None


def _read_draft(
    parsed: Parsed, facts: Facts, plugins: PluginSet, refusals: list[Refusal]
) -> ModelReading | None:
    """Return the facts of the draft model's own folder; None if there is none or reading it fails.

    A failure is added to ``refusals``.
    """
    folder = parsed.config.speculative.draft_for(facts.model.path)
    if not folder:
        return None
    try:
        return plugins.read_model(folder)
    except (FactsError, WeightError) as error:
        fix = getattr(error, "fix", "") or "a draft folder that can be read"
        refusals.append(
            Refusal("facts", "speculative.draft_model", str(error), fix + ", or leave it out")
        )
    return None


def _contributions(
    plugins: PluginSet, facts: Facts | None, own: Mapping[str, Any]
) -> dict[str, tuple[Any, Contributor]]:
    """Return the defaults that plugins and the caller set: dotted path -> (value, contributor).

    Later plugins take precedence over earlier ones, and the caller's own defaults over all. Lists
    of components are joined, and have a contributor for each item.
    """
    found: dict[str, tuple[Any, Contributor]] = {}
    if facts is not None:
        for name, values in plugins.call_each("contribute_defaults", facts=facts):
            for path, value in (values or {}).items():
                found[path] = _joined(found.get(path), value, name)
    return found | {path: (value, CALLER) for path, value in own.items()}


def _joined(
    before: tuple[Any, Contributor] | None, value: Any, name: str
) -> tuple[Any, Contributor]:
    """Return a plugin's default with its contributor, joined with that of earlier plugins.

    Only lists are joined; an item that is already there is not repeated.
    """
    if not isinstance(value, list):
        return value, name
    items, names = before or ([], [])
    new = [one for one in value if one not in items]
    return [*items, *new], [*names, *[name] * len(new)]


# ---- remarks -------------------------------------------------------------------------------------


def remarks_on_facts(proposal: Proposal) -> list[Decision]:
    """Return notes for the plan's table on the origin of its facts.

    The notes are about the checkpoint, the packages that a fact sheet states, and the chat
    template.
    """
    model = proposal.facts.model
    stated = proposal.facts.hardware.packages
    remarks = [
        Decision("facts", note, "facts", "the checkpoint", notable=True) for note in model.notes
    ]
    if stated is not None:
        remarks.append(_packages(stated, proposal.facts.software.packages))
    if proposal.config.chat_template is not None:
        remarks.append(_template_decision(proposal, proposal.config.chat_template))
    return remarks


def _packages(stated: Mapping[str, str], packages: Mapping[str, str]) -> Decision:
    """Return the note that lists the packages of a fact sheet, and those of this environment."""

    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"{name} {packages[name]}" for name in sorted(names))

    here = listed(packages.keys() - stated.keys())
    why = listed(packages.keys() & stated.keys()) or "none"
    return Decision(
        "packages", "of the sheet", "facts", f"{why}; from here: {here}" if here else why
    )


def _template_decision(proposal: Proposal, given: str) -> Decision:
    from glowplug.core.text.chat_template import is_inline

    by, why = proposal.source("chat_template") or ("default", "")
    return Decision(
        "chat_template", "inline" if is_inline(given) else PurePath(given).name, by, why
    )
