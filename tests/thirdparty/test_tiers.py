"""The sample prefix cache of a third party: evicted pages are kept in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.api import EnginePlan
from glowplug.core.protocols import PrefixCache, Worker
from glowplug.core.testing.suites.tiers import TieredCacheSuite
from tests.thirdparty.packages import FOLDER

NAME = "glowplug-tiers"
PLUGIN = ["glowplug_tiers.plugin"]


@pytest.fixture(scope="module", autouse=True)
def _package() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER / NAME / "src"))
        yield


class TestTiers(TieredCacheSuite):
    def make(self, plan: EnginePlan) -> PrefixCache:
        from glowplug_tiers.plugin import TiersOptions
        from glowplug_tiers.runtime import Tiers

        found: PrefixCache = Tiers(TiersOptions(), plan, Worker())
        return found
