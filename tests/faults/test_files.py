"""Faults of files: a device that cannot read, a full one, folders that cannot be written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from glowplug import LLM, SamplingParams
from glowplug.core.errors import GlowplugError, RequestError, WeightError
from glowplug.core.facts.machine import software
from glowplug.entrypoints.cli.main import main
from glowplug.plugins.weights.direct_read import DirectReader, Span, blocks_of
from tests.support.tiny import write_config


@pytest.mark.parametrize("at", [1, 3])
def test_a_read_error_in_the_middle_of_weights_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    preadv, calls = os.preadv, []

    def failing(*given: Any) -> int:
        calls.append(given)
        if len(calls) == at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(*given)

    monkeypatch.setattr(os, "preadv", failing)
    reader: DirectReader[str] = DirectReader("cpu", 2, piece=16)
    with pytest.raises(WeightError, match=r"model\.safetensors: cannot be read: Input/output"):
        list(reader.read(blocks_of([Span("all", tmp_path / "model.safetensors", 0, 100)])))
    reader.close()


def test_a_full_disk_while_a_trace_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command fails with the reason; the engine goes on, and can trace again."""
    monkeypatch.setenv("GLOWPLUG_PROFILE_DIR", str(tmp_path / "traces"))
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with LLM(
        model=str(write_config(tmp_path, "v3")),
        weights={"use": "random"},
        skip_tokenizer=True,
        device="cpu",
        context_length=64,
        memory={"kv_tokens": 256},
    ) as llm:
        answer = llm.generate([[5, 6]], params)[0].token_ids

        def full(*given: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(torch.profiler.profile, "export_chrome_trace", full)
            llm.control("profile_start", label="full")
            with pytest.raises(RequestError, match="No space left on device"):
                llm.control("profile_stop")
        assert llm.generate([[5, 6]], params)[0].token_ids == answer
        llm.control("profile_start", label="again")
        assert (tmp_path / "traces" / llm.control("profile_stop")["file"]).exists()


@pytest.mark.skipif(not software(()).cxx, reason="needs a C++ compiler")
def test_a_kernel_cache_that_cannot_be_written_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder lies below a file, which also root cannot write."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "kernels"
    with pytest.raises(GlowplugError, match="cannot be kept") as refused:
        LLM(
            model=str(write_config(tmp_path, "v3")),
            weights={"use": "random"},
            skip_tokenizer=True,
            device="cpu",
            ops={"use": "torch_compile", "cache_dir": str(folder)},
            memory={"kv_tokens": 256},
        )
    for part in (str(folder), "ops.cache_dir", 'ops.use = "auto"'):
        assert part in str(refused.value)


@pytest.mark.skipif(not software(()).cxx, reason="needs a C++ compiler")
def test_a_kernel_cache_with_a_space_in_its_name_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor splits its command line for g++ at spaces, and would fail in the self-test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    with pytest.raises(GlowplugError, match="a space in its name; set ops.cache_dir"):
        LLM(
            model=str(write_config(tmp_path, "v3")),
            weights={"use": "random"},
            skip_tokenizer=True,
            device="cpu",
            ops={"use": "torch_compile", "cache_dir": str(tmp_path / "my kernels")},
            memory={"kv_tokens": 256},
        )


def test_a_triton_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "kernels"
    script = "from triton.runtime.cache import get_cache_manager; get_cache_manager('0' * 64)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode and str(folder) in done.stderr.splitlines()[-1]


def test_the_flag_of_a_soft_watchdog_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model", "embedded", "--soft-watchdog-timeout", "60"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "soft-watchdog-timeout" in error and "--watchdog-timeout SECONDS" in error
