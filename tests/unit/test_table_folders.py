"""Tuned tables: the user's folder before the packaged one, versions, and broken files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.plugins.quantization.shared import provider_choice, provider_tables, tuned_tables
from tests.support.tables import forget
from tests.support.tiny import write_config

NAME = "N=1,K=2,device_name=NVIDIA_H200,dtype=bfloat16,triton=3.6.json"
FP8 = "fp8_gemm,device_name=NVIDIA_H200.json"
VERSIONS = {"triton": "3.6.0", "torch": "2.11.0", "sgl-deep-gemm": "0.1.0"}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """The user's folder and the packaged one, both empty."""
    own, packaged = tmp_path / "own", tmp_path / "packaged"
    packaged.mkdir()
    monkeypatch.setattr(tuned, "FOLDER", packaged)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv(tuned.VARIABLE, str(own))
    forget()
    yield own, packaged
    forget()


def put(folder: Path, name: str, value: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    forget()
    return path


def read_only(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Make folders count as not writable, also for root."""
    monkeypatch.setattr(tuned, "is_writable", lambda folder: folder not in folders)


class TestPrecedence:
    def test_the_users_table_replaces_the_packaged_one(self, folders: tuple[Path, Path]) -> None:
        own, packaged = folders
        put(packaged, NAME, {"8": {"way": "packaged"}, "64": {"way": "packaged"}})
        assert tuned.table(NAME) == {8: {"way": "packaged"}, 64: {"way": "packaged"}}
        put(own, NAME, {"16": {"way": "own"}})
        assert tuned.table(NAME) == {16: {"way": "own"}}
        assert tuned.names() == [NAME]

    def test_the_folder_is_in_the_users_data_without_the_variable(
        self, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(tuned.VARIABLE)
        assert tuned.user_folder() == tmp_path / "data" / "glowplug" / "tables"
        monkeypatch.delenv("XDG_DATA_HOME")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert tuned.user_folder() == tmp_path / "home/.local/share/glowplug/tables"

    def test_measurements_go_where_they_are_read_and_can_be_written(
        self, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own, packaged = folders
        assert tuned.path_to_write(NAME) == own / NAME
        monkeypatch.delenv(tuned.VARIABLE)
        assert tuned.path_to_write(NAME) == packaged / NAME
        data = tmp_path / "data" / "glowplug" / "tables"
        put(data, NAME, {})
        assert tuned.path_to_write(NAME) == data / NAME, "else it would hide the new table"
        assert tuned.path_to_write(FP8) == packaged / FP8
        read_only(monkeypatch, packaged)
        assert tuned.path_to_write(FP8) == data / FP8

    def test_a_tuner_continues_the_packaged_table_in_the_users_folder(
        self, folders: tuple[Path, Path]
    ) -> None:
        own, packaged = folders
        put(packaged, NAME, {"64": {"way": "a"}, "8": {"way": "a"}})
        path = tuned.path_to_write(NAME)
        table = tuned.begun(path)
        assert list(table) == [8, 64]
        tuned.keep(path, {**table, 16: {"way": "b"}})
        forget()
        assert tuned.table(NAME) == {8: {"way": "a"}, 16: {"way": "b"}, 64: {"way": "a"}}
        assert json.loads((packaged / NAME).read_text()).keys() == {"8", "64"}


class TestBrokenFiles:
    @pytest.mark.parametrize("text", ["{", "[]", '{"8": 3}', '{"eight": {}}', '{"8": {}'])
    def test_a_broken_table_is_named_and_the_packaged_one_applies(
        self, folders: tuple[Path, Path], text: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        own, packaged = folders
        put(packaged, NAME, {"8": {"way": "packaged"}})
        path = put(own, NAME, text)
        assert tuned.table(NAME) == {8: {"way": "packaged"}}
        assert f"{path} is not a table of measurements" in caplog.text
        assert "ignored" in caplog.text
        with pytest.raises(ValueError, match="is not a table of measurements"):
            tuned.begun(path)

    @pytest.mark.parametrize(
        "text",
        ["{", '{"versions": {}, "fastest": {"N=1,K=2": {"8": 3}}}', '{"N=1,K=2": {"x": ""}}'],
    )
    def test_a_broken_table_of_providers_is_named(
        self, folders: tuple[Path, Path], text: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = put(folders[0], FP8, text)
        assert provider_choice.measured("fp8_gemm", "NVIDIA H200", "3.6.0") == {}
        assert f"{path} is not a table" in caplog.text

    def test_the_plan_names_the_users_tables_and_broken_files(
        self, folders: tuple[Path, Path], tmp_path: Path
    ) -> None:
        own, _ = folders
        assert tuned_tables.FILES_FIELD not in decided(plan(tmp_path))
        put(own, FP8, {"versions": VERSIONS, "fastest": {}})
        value, why = decided(plan(tmp_path))[tuned_tables.FILES_FIELD]
        assert value == "the user's first" and str(own) in why and "ignored" not in why
        path = put(own, NAME, "{")
        _, why = decided(plan(tmp_path))[tuned_tables.FILES_FIELD]
        assert f"{path} is not a table of measurements" in why and "it is ignored" in why


def plan(folder: Path, **packages: str) -> EnginePlan:
    """Return the plan of a small model in block FP8 on an H200 with these packages."""
    plugins = load_plugins(entry_points=False)
    installed = {**plugins.software.packages, **VERSIONS, **packages}
    plugins.__dict__["software"] = replace(plugins.software, packages=installed)
    return make_plan(
        {
            "model": str(write_config(folder, "v3_fp8")),
            "skip_tokenizer": True,
            "dtype": "bfloat16",
            "weights": {"use": "random"},
            "quantization": {"use": "block_fp8"},
        },
        hardware=replace(read_sheet("1xh200"), packages=None),
        plugins=plugins,
    )


def decided(plan: EnginePlan) -> dict[str, tuple[Any, str]]:
    return {decision.field: (decision.value, decision.why) for decision in plan.decisions}


class TestVersions:
    TABLE = {"N=96,K=64": {"8": "triton", "64": "deep_gemm"}}

    def test_a_table_of_another_triton_is_not_used(
        self, folders: tuple[Path, Path], tmp_path: Path
    ) -> None:
        put(folders[0], FP8, {"versions": VERSIONS, "fastest": self.TABLE})
        for version, fits in (("3.6.0", True), ("3.6.7", True), ("3.7.0", False), ("", True)):
            found = provider_choice.measured("fp8_gemm", "NVIDIA H200", version)
            assert found == (self.TABLE if fits else {}), version
        value, why = decided(plan(tmp_path, triton="3.7.0"))[provider_choice.FIELD]
        assert value == "rules"
        assert (
            "the table of NVIDIA H200 is not used (measured with Triton 3.6, here is 3.7)" in why
            and "glowplug tune fp8-gemm" in why
        )

    def test_a_table_of_another_library_is_used_and_the_plan_names_it(
        self, folders: tuple[Path, Path], tmp_path: Path
    ) -> None:
        put(folders[0], FP8, {"versions": VERSIONS, "fastest": self.TABLE})
        value, why = decided(plan(tmp_path))[provider_choice.FIELD]
        assert value == "by shape" and "measured with" not in why
        value, why = decided(plan(tmp_path, **{"sgl-deep-gemm": "0.2.0"}))[provider_choice.FIELD]
        assert value == "by shape"
        assert "measured with sgl-deep-gemm 0.1.0 (here 0.2.0)" in why and "again" in why

    def test_a_table_without_versions_is_used(self, folders: tuple[Path, Path]) -> None:
        put(folders[0], FP8, self.TABLE)
        assert provider_choice.measured("fp8_gemm", "NVIDIA H200", "3.9.0") == self.TABLE

    def test_measurements_of_other_versions_are_replaced(self, folders: tuple[Path, Path]) -> None:
        own, packaged = folders
        put(packaged, FP8, {"versions": VERSIONS, "fastest": self.TABLE})
        path = own / FP8
        assert provider_tables.rows_done(path, "N=96,K=64", VERSIONS) == (8, 64)
        newer = {**VERSIONS, "sgl-deep-gemm": "0.2.0"}
        assert provider_tables.rows_done(path, "N=96,K=64", newer) == ()
        provider_tables.note_provider(path, "N=96,K=64", 8, "cutlass", newer)
        assert json.loads(path.read_text()) == {
            "versions": newer,
            "fastest": {"N=96,K=64": {"8": "cutlass"}},
        }
        assert provider_choice.measured("fp8_gemm", "NVIDIA H200", "3.6.0") == {
            "N=96,K=64": {"8": "cutlass"}
        }

    def test_every_packaged_table_of_providers_states_its_versions(self) -> None:
        paths = list(tuned.FOLDER.glob("*_gemm,device_name=*.json"))
        assert len(paths) >= 3
        for path in paths:
            assert provider_tables.read(path).versions.keys() >= {"triton", "torch"}, path
