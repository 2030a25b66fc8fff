"""Decided values: read by attribute or item, refused by name if unknown or read too early."""

from __future__ import annotations

from typing import Any

import pytest

from glowplug.core.errors import GlowplugError, Refusal
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plugin.component import CheckContext
from glowplug.core.plugin.decided import Decided, Undecided
from glowplug.core.plugin.offers import PolicyOffers
from glowplug.core.testing.harness.fakes import component
from tests.plan.test_refusals import with_components


@pytest.mark.parametrize("name", sorted(Decided.__annotations__))
def test_an_early_read_raises_with_the_name(name: str) -> None:
    values = Decided()
    with pytest.raises(Undecided, match=f"^{name} is read before the plan has decided it"):
        getattr(values, name)
    with pytest.raises(GlowplugError, match=name):
        values[name]


def test_a_value_is_read_by_attribute_and_by_item() -> None:
    values = Decided(device="cuda", width=3)
    values.ranks = 2
    assert (values.device, values.width, values.ranks) == ("cuda", 3, 2)
    assert (values["device"], values["width"], values["ranks"]) == ("cuda", 3, 2)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(TypeError, match="devize"):
        Decided(devize="cuda")
    values: Any = Decided(device="cuda")
    with pytest.raises(AttributeError, match="'devize'"):
        values.devize  # noqa: B018
    with pytest.raises(KeyError, match="devize"):
        values["devize"]
    assert not hasattr(values, "devize")


def test_an_item_may_have_its_former_name() -> None:
    values = Decided(expandable_segments=True)
    assert values["growing_segments"] is values["expandable_segments"] is True
    with pytest.raises(Undecided, match="expandable_segments"):
        Decided()["growing_segments"]


def test_a_check_reads_values_by_item(refused: Any) -> None:
    """A plugin written before the values had attributes."""

    def check(context: CheckContext) -> Any:
        values = context.values
        names = ("device", "dtype", "kv_dtype", "width", "lookahead", "ranks", "hosts", "mesh")
        said = " ".join(f"{name}={values[name]}" for name in names)
        yield Refusal("strict", "policy.use", said, "another policy")

    own = component("policy", "strict", PolicyOffers(), check=check)
    found = refused(
        {"dtype": "bfloat16", "policy": {"use": "strict"}},
        hardware=read_sheet("1xh200"),
        plugins=with_components(policy=[own]),
    )
    assert found["policy.use"].reason == (
        "device=cuda dtype=bfloat16 kv_dtype=bfloat16 width=1 lookahead=0 ranks=1 hosts=1 mesh={}"
    )
