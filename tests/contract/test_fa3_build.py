"""``fa3_build.lacks`` for a build that ends the process, one that raises, and one that returns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.contract import fa3_build


@pytest.fixture
def lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """``fa3_build.lacks`` with a library whose functions have a given body."""

    def of(body: str) -> str | None:
        package = tmp_path / "sgl_kernel"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        (package / "flash_attn.py").write_text(body)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        fa3_build.lacks.cache_clear()
        return fa3_build.lacks(9, 3, 64, torch.float16, "cpu")

    yield of
    fa3_build.lacks.cache_clear()


def library(body: str) -> str:
    return (
        f"import os, sys\ndef flash_attn_varlen_func(*args, **named):\n    {body}\n"
        "flash_attn_with_kvcache = flash_attn_varlen_func\n"
    )


def test_a_library_that_answers(lacks) -> None:  # type: ignore[no-untyped-def]
    assert lacks(library("return None")) is None


def test_a_library_that_ends_the_process(lacks) -> None:  # type: ignore[no-untyped-def]
    said = lacks(library("sys.stderr.write('CUDA error: none'); sys.stderr.flush(); os._exit(1)"))
    assert said is not None and said.startswith("exit code 1") and "CUDA error" in said


def test_a_library_that_raises(lacks) -> None:  # type: ignore[no-untyped-def]
    assert "no such head" in (lacks(library("raise RuntimeError('no such head')")) or "")


def test_a_library_that_cannot_be_called_is_an_error(lacks) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AssertionError, match="flash_attn_varlen_func"):
        lacks("")
