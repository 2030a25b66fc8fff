"""Streams for capturing: live recorders have different streams, and a stream is reused once its
recorder is gone.
"""

from __future__ import annotations

import gc

import pytest
import torch

from glowplug.plugins.graphs.capture import recorder as cuda_recorder

CARD = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The streams created, in order; no GPU is needed."""
    made: list[object] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            made.append(self)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(cuda_recorder, "_unused", {})
    return made


def test_successive_recorders_share_a_stream(streams: list[object]) -> None:
    for _ in range(3):
        recorder = cuda_recorder.CudaRecorder(CARD)
        assert recorder.stream is streams[0]
        del recorder
        gc.collect()
    assert len(streams) == 1


def test_live_recorders_have_streams_of_their_own(streams: list[object]) -> None:
    first, second = (cuda_recorder.CudaRecorder(CARD) for _ in range(2))
    other = cuda_recorder.CudaRecorder(torch.device("cuda", 1))
    assert [id(recorder.stream) for recorder in (first, second, other)] == [
        id(stream) for stream in streams
    ]
    freed = second.stream
    del second
    gc.collect()
    assert cuda_recorder.CudaRecorder(CARD).stream is freed is not first.stream
    assert len(streams) == 3
