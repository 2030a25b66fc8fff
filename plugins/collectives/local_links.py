"""Exchange of host data between the ranks of one host, over Unix sockets through rank 0."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray
from torch.distributed import Store

from glowplug.core.errors import CollectiveError

HEAD = struct.Struct("<q")  #: a rank's number or a frame's length
KEY = "address of rank 0"


class LocalLinks:
    """Socket connections of a rank of one host: to rank 0, or from rank 0 to all other ranks.

    Args:
        rank: This rank.
        ranks: Number of ranks.
        store: The rendezvous store, in which rank 0 gives its address.
        timeout: Seconds to wait for another rank.

    Raises:
        CollectiveError: A rank has ended or does not answer in time; the methods raise it too.
    """

    def __init__(self, rank: int, ranks: int, store: Store, timeout: float) -> None:
        self._rank = rank
        self._ranks = ranks
        self._timeout = timeout
        self._peers: dict[int, socket.socket] = {}
        if rank == 0:
            self._listen(store)
        else:
            self._connect(store.get(KEY).decode())

    def _listen(self, store: Store) -> None:
        """Accept a connection from every other rank."""
        with (
            tempfile.TemporaryDirectory(prefix="glowplug-") as folder,
            socket.socket(socket.AF_UNIX) as listener,
            self._errors("connecting"),
        ):
            path = os.path.join(folder, "ranks")
            listener.bind(path)
            listener.listen(self._ranks)
            listener.settimeout(self._timeout)
            store.set(KEY, path)
            for _ in range(1, self._ranks):
                peer, _ = listener.accept()
                peer.settimeout(self._timeout)
                self._peers[HEAD.unpack(self._read(peer, HEAD.size))[0]] = peer

    def _connect(self, path: str) -> None:
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(self._timeout)
        self._peers[0] = peer
        with self._errors("connecting", 0):
            peer.connect(path)
            peer.sendall(HEAD.pack(self._rank))

    def broadcast(self, data: bytes | None, operation: str = "broadcast_bytes") -> bytes:
        """Send rank 0's ``data`` to all ranks, and return it on each of them.

        Args:
            data: The bytes to send, on rank 0; None on all other ranks.
            operation: Name of the operation in error messages.
        """
        if self._rank:
            return self._receive(0, operation)
        assert data is not None, "rank 0 must pass the bytes"
        for rank in range(1, self._ranks):
            self._send(rank, data, operation)
        return data

    def gather(self, data: bytes, operation: str = "all_gather_bytes") -> list[bytes]:
        """Return the ``data`` of every rank, in order of ranks.

        ``operation``: name of the operation in error messages.
        """
        if self._rank == 0:
            every = [data]
            every += [self._receive(rank, operation) for rank in range(1, self._ranks)]
            sizes = struct.pack(f"<{self._ranks}q", *map(len, every))
            self.broadcast(sizes + b"".join(every), operation)
            return every
        self._send(0, data, operation)
        joined = self.broadcast(None, operation)
        lengths = struct.unpack_from(f"<{self._ranks}q", joined)
        ends = np.cumsum([HEAD.size * self._ranks, *lengths]).tolist()
        return [joined[start:end] for start, end in zip(ends, ends[1:])]

    def gather_numbers(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ``values``, int64 [N], of every rank as one array, int64 [ranks, N]."""
        every = b"".join(self.gather(values.tobytes(), "all_gather_numbers"))
        return np.frombuffer(every, np.int64).reshape(self._ranks, len(values))

    def close(self) -> None:
        """Close the connections; ranks that still wait for this one get an error. Idempotent."""
        for peer in self._peers.values():
            with suppress(OSError):  # the peer may have closed it
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()

    def _send(self, rank: int, data: bytes, operation: str) -> None:
        with self._errors(operation, rank):
            self._peers[rank].sendall(HEAD.pack(len(data)) + data)

    def _receive(self, rank: int, operation: str) -> bytes:
        with self._errors(operation, rank):
            peer = self._peers[rank]
            return self._read(peer, HEAD.unpack(self._read(peer, HEAD.size))[0])

    @staticmethod
    def _read(peer: socket.socket, size: int) -> bytes:
        """Return the next ``size`` bytes from ``peer``.

        Raises:
            ConnectionError: the peer has closed the connection.
        """
        data = peer.recv(size, socket.MSG_WAITALL) if size else b""
        while len(data) < size:
            more = peer.recv(size - len(data), socket.MSG_WAITALL)
            if not more:
                raise ConnectionError("the connection was closed")
            data += more
        return data

    @contextmanager
    def _errors(self, operation: str, rank: int | None = None) -> Iterator[None]:
        """Turn socket errors in the ``with`` block into a CollectiveError.

        The error names ``operation`` and, unless None, the other ``rank``.
        """
        try:
            yield
        except OSError as error:
            other = "another rank" if rank is None else f"rank {rank}"
            reason = (
                f"timed out after {self._timeout:g} s waiting for {other}"
                if isinstance(error, TimeoutError)
                else f"{other} has ended ({error})"
            )
            raise CollectiveError(
                f"{operation} failed on rank {self._rank} of {self._ranks}: {reason}"
            ) from error
