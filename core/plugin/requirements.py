"""Packages that a component needs against those that are installed. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plugin.component import Component, Package


def missing_packages(component: Component, packages: Mapping[str, str]) -> list[tuple[str, str]]:
    """(requirement, what is installed) of each package that is missing or of the wrong version."""
    return [
        (f"{package.name}{package.spec}", found)
        for package in component.requires
        if (found := unmet(package, packages))
    ]


def unmet(package: Package, packages: Mapping[str, str]) -> str:
    """The version that is installed instead, or "not installed"; "": it is met."""
    version = packages.get(package.name, "")
    if not version:
        return "not installed"
    return "" if _matches(version, package.spec) else version


def installation(requirement: str, machine: HardwareFacts) -> str:
    """Return the fix for a package that is missing on ``machine``: a sheet that states packages has
    to state it too.
    """
    install = f'pip install "{requirement}"'
    if machine.packages is None:
        return install
    return f"{install} on that machine, and a sheet that states it (glowplug facts)"


@cache
def _matches(version: str, spec: str) -> bool:
    from packaging.specifiers import (  # only few components ask, and it is slow to import
        InvalidSpecifier,
        SpecifierSet,
    )

    try:
        return SpecifierSet(spec, prereleases=True).contains(version)
    except InvalidSpecifier:
        return False
