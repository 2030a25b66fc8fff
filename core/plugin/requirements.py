"""Comparison of required packages with installed packages. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plugin.component import Component, Package


def missing_packages(component: Component, packages: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the requirements of a component that are not met, each with the installed version.

    The version of a missing package is "not installed".
    """
    return [
        (f"{package.name}{package.spec}", found)
        for package in component.requires
        if (found := unmet(package, packages))
    ]


def unmet(package: Package, packages: Mapping[str, str]) -> str:
    """Return why ``package`` is not met: a wrong version or "not installed"; empty if it is met."""
    version = packages.get(package.name, "")
    if not version:
        return "not installed"
    return "" if _matches(version, package.spec) else version


def installation(requirement: str, machine: HardwareFacts) -> str:
    """Return the fix for a package that is missing on ``machine``.

    If the packages of ``machine`` come from a fact sheet, the sheet has to state the package too.
    """
    install = f'pip install "{requirement}"'
    if machine.packages is None:
        return install
    return f"{install} on that machine, and a sheet that states it (glowplug facts)"


@cache
def _matches(version: str, spec: str) -> bool:
    """Return whether ``version`` satisfies ``spec``; an invalid ``spec`` matches no version."""
    # imported here because the import is slow and few components have requirements
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(spec, prereleases=True).contains(version)
    except InvalidSpecifier:
        return False
