"""Failing plugins: each stops the start with the plugin, its distribution and version; nothing
stays registered.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pluggy
import pytest

from glowplug.core.errors import PluginLoadError
from glowplug.core.plan.plan import Choice
from glowplug.core.plugin import hookspecs
from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.loading import PluginSource, load
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.startup.components import build_component, load_plugins_for
from glowplug.plugins.built_in import DEFAULT_PLUGINS

HEAD = """
from typing import Literal
from glowplug.core.plugin.component import Component, Options
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import AttentionOffers, Offers
from glowplug.core.plugin.options import AttentionOptions

class Mine(AttentionOptions):
    use: Literal["mine"] = "mine"

def made(**changes):
    values = dict(name="mine", options=Mine, factory="nowhere:X",
                  offers=AttentionOffers(kinds=frozenset({"mla"})))
    return Component(**{**values, **changes})
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def distribution(
    site: Path, name: str, version: str, body: str, entry: str = "mine", head: str = HEAD
) -> str:
    """Write an installed distribution with one module and one entry point, and return the module's
    name.
    """
    module = name.replace("-", "_")
    (site / f"{module}.py").write_text(head + body)
    info = site / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[glowplug]\n{entry} = {module}\n")
    sys.modules.pop(module, None)
    return module


REGISTER = "\n@hookimpl\ndef register_attention_backends():\n    return {}\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("import not_there_at_all", "ModuleNotFoundError"),
        ("syntax error here", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("\n@hookimpl\ndef read_config_file(path, wrong_name):\n    return None\n", "wrong_name"),
        (
            "\n@hookimpl\ndef register_atention_backends():\n    return []\n",
            "did you mean 'register_attention_backends'",
        ),
        (REGISTER.format("1 / 0"), "ZeroDivisionError"),
        (REGISTER.format("(made() for _ in range(1))"), "returned generator, expected a list"),
        (REGISTER.format("['mine']"), "is not a Component"),
        (REGISTER.format("[made(offers=Offers())]"), "expected AttentionOffers"),
        (REGISTER.format("[made(options=Options)]"), "subclass of AttentionOptions"),
        (REGISTER.format("[made(name='other')]"), "Literal['other']"),
        (REGISTER.format("[made(factory='nowhere')]"), "package.module:Class"),
        (REGISTER.format("[made(), made()]"), "two plugins register attention 'mine'"),
    ],
)
def test_a_fault_names_plugin_distribution_and_version(site: Path, body: str, said: str) -> None:
    distribution(site, "glowplug-faulty", "3.1.4", body)
    with pytest.raises(PluginLoadError) as caught:
        load_plugins()
    assert said in str(caught.value)
    assert "'mine' (glowplug-faulty 3.1.4)" in str(caught.value)


def test_a_plugin_that_is_not_found_is_refused_with_the_search_places(site: Path) -> None:
    with pytest.raises(PluginLoadError) as caught:
        load_plugins(["no_such_plugin.at_all"])
    assert "No module named 'no_such_plugin'" in str(caught.value) and "PYTHONPATH" in str(
        caught.value
    )
    assert "<frozen" not in str(caught.value)
    distribution(site, "glowplug-imports", "1.0", "import not_there_at_all")
    with pytest.raises(PluginLoadError) as caught:
        load_plugins()
    assert "glowplug_imports.py:" in str(caught.value) and "PYTHONPATH" not in str(caught.value)


def test_a_hanging_plugin_is_named_with_its_stack(site: Path) -> None:
    body = "import threading\ndef wait_for_ever():\n    threading.Event().wait()\nwait_for_ever()\n"
    distribution(site, "glowplug-hangs", "1.0", body)
    with pytest.raises(PluginLoadError) as caught:
        load_plugins(timeout=0.5)
    text = str(caught.value)
    assert "glowplug-hangs 1.0" in text and "0.5 s" in text and "wait_for_ever" in text


def test_two_entry_points_of_one_name(site: Path) -> None:
    distribution(site, "glowplug-one", "1.0", "")
    distribution(site, "glowplug-two", "2.0", "")
    with pytest.raises(PluginLoadError) as caught:
        load_plugins()
    assert "glowplug-one 1.0" in str(caught.value) and "glowplug-two 2.0" in str(caught.value)


def test_a_taken_component_name_names_both(site: Path) -> None:
    distribution(site, "glowplug-one", "1.0", REGISTER.format("[made()]"), entry="one")
    distribution(site, "glowplug-two", "2.0", REGISTER.format("[made()]"), entry="two")
    with pytest.raises(PluginLoadError) as caught:
        load_plugins()
    assert "glowplug-one 1.0" in str(caught.value) and "glowplug-two 2.0" in str(caught.value)
    assert [r.distribution for r in load_plugins(block=["two"]).components("attention")][
        -1
    ] == "glowplug-one"


def test_a_plugin_may_not_take_a_built_in_name(site: Path) -> None:
    body = REGISTER.format("[made(name='torch_mla', options=Own)]")
    distribution(
        site,
        "glowplug-thief",
        "1.0",
        "\nclass Own(AttentionOptions):\n    use: Literal['torch_mla'] = 'torch_mla'\n" + body,
    )
    with pytest.raises(PluginLoadError, match="built in.*glowplug-thief 1.0"):
        load_plugins()


def test_a_good_one_is_listed_last_with_its_distribution(site: Path) -> None:
    distribution(site, "glowplug-good", "1.2", REGISTER.format("[made()]"))
    plugins = load_plugins()
    component, dist, version = plugins.components("attention")[-1]
    assert (component.name, dist, version) == ("mine", "glowplug-good", "1.2")
    assert plugins.names[: len(DEFAULT_PLUGINS)] == DEFAULT_PLUGINS and "mine" in plugins.names
    bare = load_plugins(block=["mine"])
    assert bare.find("attention", "mine") is None and bare.fingerprint != plugins.fingerprint
    with pytest.raises(PluginLoadError, match="cannot block 'nothing'"):
        load_plugins(block=["nothing"])


def test_extra_modules_and_one_module_twice(site: Path) -> None:
    module = distribution(site, "glowplug-good", "1.2", REGISTER.format("[made()]"))
    plugins = load_plugins(extra=[module])
    assert [r.component.name for r in plugins.components("attention")].count("mine") == 1
    (site / "loose_module.py").write_text(HEAD + REGISTER.format("[made()]"))
    with pytest.raises(PluginLoadError, match="loose_module"):
        load_plugins(extra=["loose_module"])


def test_distributions_are_read_again_only_after_one_came(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading all of them takes a third of a second, and every start of an engine needs the
    result. Those of other folders are not read again.
    """
    reads: list[str] = []
    read = importlib.metadata.distributions

    def counted(*, path: list[str]) -> object:
        reads.extend(path)
        return read(path=path)

    monkeypatch.setattr(importlib.metadata, "distributions", counted)
    (site / "late_module.py").write_text(HEAD + REGISTER.format("[made()]"))

    def origins() -> list[str]:
        return [
            source.origin
            for source in load_plugins(["late_module"], entry_points=False).sources[-1:]
        ]

    first = origins()
    reads.clear()  # importing the module may write its cache beside it, which changes the folder
    assert first == origins() == origins() == ["module late_module"] and len(reads) <= 1
    before = len(reads)
    info = site / "glowplug_late-3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: glowplug-late\nVersion: 3.0\n")
    (info / "top_level.txt").write_text("late_module\n")
    assert origins() == origins() == ["glowplug-late 3.0"] and reads[before:] == [str(site)]


def test_a_module_s_hook_may_be_a_bound_method(site: Path) -> None:
    body = (
        "class Held:\n    @hookimpl\n    def register_attention_backends(self):\n"
        "        return [made()]\n"
        "register_attention_backends = Held().register_attention_backends\n"
    )
    distribution(site, "glowplug-bound", "1.0", body)
    assert load_plugins().find("attention", "mine") is not None


def test_nothing_stays_registered_after_a_failure() -> None:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)

    class Half:
        @hookimpl
        def register_attention_backends(self) -> list[Component]:
            return [None]  # type: ignore[list-item]

    class Wrong:
        @hookimpl
        def read_config_file(self, path: Path, more: int) -> None:
            return None

    for plugin in (Half(), Wrong()):
        with pytest.raises(PluginLoadError):
            load(manager, PluginSource("x", "", "d", "1", loaded=plugin))
        assert manager.get_plugins() == set()
        assert manager.hook.register_attention_backends.get_hookimpls() == []


def test_a_worker_loads_the_same_set_or_refuses(site: Path, planned) -> None:
    distribution(site, "glowplug-good", "1.2", REGISTER.format("[made()]"))
    plan = planned(plugins=load_plugins())
    assert load_plugins_for(plan).fingerprint == plan.plugin_fingerprint
    bare = planned(plugins=load_plugins(block=["mine"]))
    assert load_plugins_for(bare).find("attention", "mine") is None
    (site / "glowplug_good-1.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: glowplug-good\nVersion: 1.3\n"
    )
    with pytest.raises(PluginLoadError, match="glowplug-good 1.3"):
        load_plugins_for(plan)


def test_build_parses_again_and_names_the_missing_plugin(planned, plugins: PluginSet) -> None:
    plan = planned()
    built = build_component(
        plugins,
        Choice("policy", "longest_prefix", "", {"use": "longest_prefix", "window": 3}),
        plan,
        None,
    )
    assert callable(built.order)
    with pytest.raises(PluginLoadError, match="gone of elsewhere|'gone' of elsewhere"):
        build_component(plugins, Choice("policy", "gone", "", {}, "elsewhere"), plan, None)
    broken = PluginSet([PluginSource("b", "", "b-dist", "7", loaded=_Broken())])
    with pytest.raises(PluginLoadError, match="b-dist 7.*ModuleNotFoundError"):
        build_component(broken, Choice("cache", "lost", "", {"use": "lost"}), plan, None)


@pytest.mark.parametrize("hook", ["contribute_defaults", "check_plan"])
def test_a_planning_hook_that_raises_names_its_plugin(site: Path, planned, hook: str) -> None:
    argument = {"contribute_defaults": "facts", "check_plan": "context"}[hook]
    distribution(
        site,
        "glowplug-raises",
        "0.9",
        f"\n@hookimpl\ndef {hook}({argument}):\n    return {{}}['no']\n",
    )
    plugins = load_plugins()
    with pytest.raises(PluginLoadError, match=f"glowplug-raises 0.9.*{hook} failed: KeyError"):
        planned(plugins=plugins)


def test_a_fact_reader_that_raises_refuses_the_model(site: Path, refused) -> None:
    distribution(
        site,
        "glowplug-raises",
        "0.9",
        "\n@hookimpl\ndef read_model_facts(path):\n    return path.x\n",
    )
    found = refused(plugins=load_plugins())["model"]
    assert "AttributeError" in found.reason and "glowplug_raises.py" in found.reason


class _Broken:
    @hookimpl
    def register_prefix_caches(self) -> list[Component]:
        from glowplug.core.plugin.offers import CacheOffers
        from glowplug.core.testing.harness.fakes import component

        return [component("cache", "lost", CacheOffers())]
