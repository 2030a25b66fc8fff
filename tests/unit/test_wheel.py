"""The wheel and the sdist hold all files that the engine needs, and none of the training."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.source_tree import PACKAGES, ROOT, name_of, sources

pytestmark = pytest.mark.slow
SKIPPED = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", "build", "dist", "*.egg-info", ".*_cache", "scratch"
)
DATA = (
    "py.typed",
    "core/facts/sheets/cpu.json",
    "core/facts/sheets/packages/hopper.json",
    "entrypoints/evaluation/golden.json",
    "entrypoints/server/page/static/index.html",
    "entrypoints/server/page/static/app.css",
    "entrypoints/server/page/static/app.js",
    "models/embedded/held_out.jsonl",
    "models/embedded/checkpoint/config.json",
    "models/embedded/checkpoint/model.safetensors",
    "models/embedded/checkpoint/tokenizer.json",
    "models/embedded/checkpoint/tokenizer_config.json",
    "models/embedded/checkpoint/generation_config.json",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, and a wheel made from that sdist: both contain the files behind the links."""
    place = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, place / "tree", symlinks=True, ignore=SKIPPED)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place / "dist"), "."],
        cwd=place / "tree",
        check=True,
        capture_output=True,
        text=True,
    )
    return place / "dist"


def wheel_names(built: Path) -> list[str]:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        return archive.namelist()


def test_the_wheel_has_every_module_and_its_data(built: Path) -> None:
    names = set(wheel_names(built))
    modules = [name_of(path) for path in sources() if path.is_relative_to(ROOT / "src") is False]
    assert [name for name in modules if f"glowplug/{name}" not in names] == []
    assert [name for name in DATA if f"glowplug/{name}" not in names] == []
    shapes = [path.name for path in (ROOT / "models" / "shapes").glob("*.json")]
    assert [name for name in shapes if f"glowplug/models/shapes/{name}" not in names] == []


def test_the_wheel_installs_one_package(built: Path) -> None:
    tops = {name.split("/")[0] for name in wheel_names(built)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"glowplug"}
    assert not any("/tests/" in name for name in wheel_names(built))
    assert next(built.glob("*.whl")).stat().st_size < 24 << 20


def test_the_sdist_has_real_files_behind_the_links(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = archive.getnames()
        for package in PACKAGES:
            assert any(f"glowplug/{package}/__init__.py" in name for name in names), package


def test_the_unpacked_wheel_plans(built: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        archive.extractall(tmp_path)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    code = (
        # installed plugins stay importable
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        "import glowplug; assert glowplug.__file__.startswith(" + repr(str(tmp_path)) + ");"
        "from glowplug.entrypoints.cli.main import main; sys.exit(main(['check', '--facts', "
        "'cpu']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
