"""Faulty plugins that a start refuses, with component, distribution, version, phase and fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM
from glowplug.core.errors import GlowplugError, PluginLoadError
from glowplug.core.plugin.registry import load_plugins
from tests.faulty.written import COMPONENT, ORIGIN, PLUGIN, forget, title, write
from tests.support.tiny import write_config

OFFERS = "the offers of 'cracked': "
#: fault -> (slot, code of the plugin's module, what the message says)
AT_LOAD: dict[str, tuple[str, dict[str, str], str]] = {
    "a package is missing": ("policy", {"top": "import not_there_at_all"}, "not_there_at_all"),
    "a syntax error": ("policy", {"top": "def broken(:"}, "SyntaxError"),
    "it exits": ("policy", {"top": "raise SystemExit(3)"}, "SystemExit"),
    "a hook of another name": (
        "policy",
        {"more": "@hookimpl\ndef register_sampler():\n    return []"},
        "did you mean 'register_samplers'",
    ),
    "a hook with another argument": (
        "policy",
        {"more": "@hookimpl\ndef worker_started(rank, plan):\n    pass"},
        "Argument(s) {'rank'} are declared",
    ),
    "a hook that raises": (
        "policy",
        {"more": "@hookimpl\ndef register_samplers():\n    return {}['absent']"},
        "KeyError: 'absent'",
    ),
    "a hook that returns a tuple": (
        "policy",
        {"more": "@hookimpl\ndef register_samplers():\n    return ()"},
        "returned tuple, expected a list",
    ),
    "no component": (
        "policy",
        {"more": "@hookimpl\ndef register_samplers():\n    return ['cracked']"},
        "register_samplers: 'cracked' is not a Component",
    ),
    "offers of another slot": (
        "policy",
        {"changes": "offers=CacheOffers()"},
        "'cracked' has offers of type CacheOffers, expected PolicyOffers",
    ),
    "options of another name": ("policy", {"changes": "name='mine'"}, "Literal['mine']"),
    "a factory without class": (
        "policy",
        {"changes": "factory='glowplug_faulty'"},
        "the factory of 'cracked' must have the form 'package.module:Class'",
    ),
    "the name of a built-in": (
        "sampling",
        {
            "changes": "name='torch', options=Torch",
            "more": "class Torch(base.options):\n    use: Literal['torch'] = 'torch'",
        },
        "two plugins register sampling 'torch'",
    ),
    "a misspelt dtype": (
        "attention",
        {"changes": "offers=replace(base.offers, dtypes=frozenset({'fp32'}))"},
        OFFERS + "dtypes has 'fp32'; did you mean 'float32'?",
    ),
    "a misspelt device": (
        "attention",
        {"changes": "offers=replace(base.offers, devices=frozenset({'gpu'}))"},
        OFFERS + "devices has 'gpu'; did you mean 'cuda'?",
    ),
    "a misspelt attention": (
        "attention",
        {"changes": "offers=replace(base.offers, kinds=frozenset({'MLA'}))"},
        OFFERS + "kinds has 'MLA'; did you mean 'mla'?",
    ),
    "a capability as a version": (
        "attention",
        {"changes": "offers=replace(base.offers, compute=frozenset({9.0}))"},
        OFFERS + "compute has 9.0, which is not a compute capability; did you mean 90?",
    ),
    "an unknown mode": (
        "attention",
        {"changes": "offers=replace(base.offers, modes={'decoding': Capture.GRAPH})"},
        OFFERS + "modes has 'decoding'; did you mean 'decode'?",
    ),
    "a level that is none": (
        "attention",
        {"changes": "offers=replace(base.offers, modes={Mode.DECODE: True})"},
        OFFERS + "modes[decode] is True, which is not a Capture",
    ),
    "one word instead of a set": (
        "attention",
        {"changes": "offers=replace(base.offers, dtypes='float32')"},
        OFFERS + "dtypes must be a frozenset, not str",
    ),
}
#: fault -> (slot, what differs from a correct plugin, what the message says, phase of a hook or the
#: fix of a refusal)
AT_PLAN: dict[str, tuple[str, dict[str, str], str, str]] = {
    "its check raises": (
        "policy",
        {"changes": "check=lambda context: 1 / 0"},
        "policy: its check failed with ZeroDivisionError",
        f"fix: report it to {ORIGIN}; choose another component meanwhile",
    ),
    "written for another contract": (
        "policy",
        {"changes": "contract=99"},
        "policy.use: cracked was written for contract 99",
        f"fix: install a version of {ORIGIN} made for this release",
    ),
    "a package is too old": (
        "policy",
        {"changes": "requires=(Package('pluggy', '>=99'),)"},
        "cracked needs pluggy>=99",
        'fix: pip install "pluggy>=99"',
    ),
    "defaults that are a list": (
        "policy",
        {"more": "@hookimpl\ndef contribute_defaults(facts):\n    return ['policy.use']"},
        "contribute_defaults returned list, expected a dict",
        "phase: contribute_defaults",
    ),
    "a refusal that is a string": (
        "policy",
        {"more": "@hookimpl\ndef check_plan(context):\n    return ['too slow']"},
        "check_plan returned a list with 'too slow', expected a list of Refusal",
        "phase: check_plan",
    ),
    "sizes that cannot be computed": (
        "speculative",
        {"more": "Faulty.draft_shape = lambda self: self.no_such_field"},
        "the options of 'cracked' raised AttributeError: 'Faulty' object has no attribute "
        "'no_such_field'",
        "phase: plan",
    ),
    "options that raise": (
        "policy",
        {"more": "Faulty.without_effect = lambda self, context: self.absent"},
        "without_effect of policy 'cracked' failed: AttributeError",
        "phase: plan",
    ),
}
#: fault -> (slot, what differs from a correct plugin, what the message says, phase)
AT_BUILD: dict[str, tuple[str, dict[str, str], str, str]] = {
    "no runtime module": (
        "policy",
        {"changes": "factory='glowplug_faulty.absent:Runtime'"},
        "ModuleNotFoundError: No module named 'glowplug_faulty.absent'",
        "build",
    ),
    "no runtime class": (
        "policy",
        {"changes": "factory='glowplug_faulty.runtime:Absent'"},
        "has no attribute 'Absent'",
        "build",
    ),
    "a constructor that raises": (
        "sampling",
        {"body": "    def __init__(self, *given):\n        raise ValueError('no licence')"},
        "ValueError: no licence",
        "build",
    ),
    "a constructor of other arguments": (
        "sampling",
        {"body": "    def __init__(self, options):\n        pass"},
        "TypeError: Runtime.__init__() takes 2 positional arguments",
        "build",
    ),
    "a member is missing": (
        "policy",
        {"body": "    @property\n    def victim(self):\n        raise AttributeError"},
        "Runtime has no method 'victim'",
        "build",
    ),
    "an attribute is missing": (
        "cache",
        {"body": "    @property\n    def shares(self):\n        raise AttributeError"},
        "Runtime has no attribute 'shares'",
        "build",
    ),
    "a member of other arguments": (
        "policy",
        {"body": "    def order(self, waiting):\n        return list(waiting)"},
        "order(waiting) does not take the arguments (waiting, cached)",
        "build",
    ),
    "another width than the plan's": (
        "speculative",
        {"body": "    def width(self):\n        return 2"},
        "width() returns 2",
        "build",
    ),
    "more bytes than the plan's": (
        "attention",
        {
            "body": "    def kv_layout(self):\n"
            "        from dataclasses import replace\n"
            "        found = super().kv_layout()\n"
            "        wide = tuple(\n"
            "            replace(one, shape=(2 * one.shape[0],)) for one in found.entries\n"
            "        )\n"
            "        return replace(found, entries=wide)"
        },
        "kv_layout() contradicts the plan",
        "build",
    ),
    "it raises at load": (
        "weights",
        {"body": "    def read(self, target):\n        raise OSError('disk is gone')"},
        "OSError: disk is gone",
        "weights, in read",
    ),
    "it raises when it allocates": (
        "attention",
        {"body": "    def reserve(self, limits):\n        raise RuntimeError('no room')"},
        "RuntimeError: no room",
        "kv, in reserve",
    ),
    "tokens outside the vocabulary": (
        "sampling",
        {
            "body": "    def sample(self, *given, **named):\n"
            "        found = super().sample(*given, **named)\n"
            "        found.tokens.fill_(10 ** 6)\n"
            "        return found"
        },
        "token 1000000 of a vocabulary of 160",
        "self-test",
    ),
    "one token for all rows": (
        "sampling",
        {
            "body": "    def sample(self, *given, **named):\n"
            "        found = super().sample(*given, **named)\n"
            "        found.tokens = found.tokens[:1].repeat(3)\n"
            "        return found"
        },
        "RuntimeError: shape mismatch",
        "self-test",
    ),
}
#: the fix of a fault of a plugin
LEAVE_OUT = f"fix: correct or update {ORIGIN}, or start without it (--block-plugin faulty)"
#: fixes of faults whose message has another one than ``replace_fix``
FIXES = {
    "more bytes than the plan's": "fix: return plan.kv_layout(entries) with the function declared",
    "one token for all rows": "fix: run its conformance suite",
}


def replace_fix(slot: str) -> str:
    """Return the fix of a fault of a component."""
    return f"fix: correct or update {ORIGIN}, or choose another component ({slot}.use)"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield tmp_path
    forget()


def config(site: Path, slot: str) -> dict[str, Any]:
    """Return the configuration of a small engine that uses the faulty component."""
    chosen: dict[str, Any] = {slot: {"use": COMPONENT}}
    return {
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "device": "cpu",
        "executor": {"use": "inline"},
        "memory": {"kv_tokens": 256},
        "context_length": 64,
        "model": str(write_config(site / "model", "v3")),
        **chosen,
    }


def refused(site: Path, slot: str) -> str:
    """Start an engine with the faulty component, and return the message of its refusal."""
    with pytest.raises(GlowplugError) as caught:
        LLM(**config(site, slot)).close()
    return str(caught.value)


def names_it(text: str, owner: str, *said: str) -> None:
    """Check that a message names the owner of the fault and has all of ``said``.

    Args:
        text: the message.
        owner: the plugin or the component, with distribution and version.
        said: fault, phase and fix.
    """
    for one in (owner, *said):
        assert one in text, f"{one!r} is not in {text!r}"


@pytest.mark.parametrize("fault", AT_LOAD)
def test_a_plugin_that_cannot_be_loaded_is_named(site: Path, fault: str) -> None:
    slot, differs, said = AT_LOAD[fault]
    write(site, slot, **differs)
    with pytest.raises(PluginLoadError) as caught:
        load_plugins()
    taken = fault == "the name of a built-in"
    names_it(
        str(caught.value),
        PLUGIN.removeprefix("plugin ") if taken else PLUGIN,
        said,
        "phase: load plugins",
        "fix: block one of them (--block-plugin faulty)" if taken else LEAVE_OUT,
    )


@pytest.mark.parametrize("place", ["top", "more"])
def test_a_plugin_that_sleeps_is_named(site: Path, place: str) -> None:
    """The limit is 30 seconds; here it is shorter. The thread ends before the next test."""
    sleeping = "import time\n{}time.sleep(1.0)"
    hook = "@hookimpl\ndef register_samplers():\n    "
    write(site, "policy", **{place: sleeping.format("" if place == "top" else hook)})
    with pytest.raises(PluginLoadError) as caught:
        load_plugins(timeout=0.3)
    said = "did not finish loading within 0.3 s"
    names_it(str(caught.value), PLUGIN, said, "phase: load plugins", LEAVE_OUT)


@pytest.mark.parametrize("fault", AT_PLAN)
def test_a_plugin_that_fails_in_the_plan_is_named(site: Path, fault: str) -> None:
    slot, differs, said, phase = AT_PLAN[fault]
    write(site, slot, **differs)
    text = refused(site, slot)
    if phase.startswith("fix: "):
        names_it(text, f"by cracked ({ORIGIN}) | {phase}", said, "nothing was loaded")
    else:
        names_it(text, PLUGIN, said, f"{phase} | {LEAVE_OUT}")


@pytest.mark.parametrize("fault", AT_BUILD)
def test_a_component_that_fails_in_the_start_is_named(site: Path, fault: str) -> None:
    slot, differs, said, phase = AT_BUILD[fault]
    write(site, slot, **differs)
    fix = FIXES.get(fault, replace_fix(slot))
    names_it(refused(site, slot), title(slot), said, f"phase {phase}", fix)


@pytest.mark.parametrize("slot", ["policy", "sampling", "attention", "cache", "weights"])
def test_a_plugin_without_fault_starts(site: Path, slot: str) -> None:
    write(site, slot)
    LLM(**config(site, slot)).close()
