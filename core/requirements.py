"""Packages that a component needs against those that are installed. Plan zone: no torch."""
from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from glowplug.core.component import Component, Package


def missing_packages(component: Component, packages: Mapping[str, str]) -> list[tuple[str, str]]:
    """(requirement, what is installed) of each package that is missing or of the wrong version."""
    return [(f"{package.name}{package.spec}", found) for package in component.requires
            if (found := unmet(package, packages))]


def unmet(package: Package, packages: Mapping[str, str]) -> str:
    """The version that is installed instead, or "not installed"; "": it is met."""
    version = packages.get(package.name, "")
    if not version:
        return "not installed"
    return "" if _matches(version, package.spec) else version


@cache
def _matches(version: str, spec: str) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # only few components ask, and it is slow to import

    try:
        return SpecifierSet(spec, prereleases=True).contains(version)
    except InvalidSpecifier:
        return False
