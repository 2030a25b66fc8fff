"""The wait until host 0 listens, with the network's own reason if it never does."""

from __future__ import annotations

import socket
import time

from glowplug.core.errors import EngineDead
from glowplug.plugins.executors.ranks.host import Site

POLL = 0.2  #: seconds between two attempts to connect


def await_first_host(site: Site, timeout: float) -> None:
    """Wait until the rendezvous store of host 0 accepts a connection.

    A name that cannot be resolved is waited for as well, since it may become known when host 0
    starts.

    Args:
        site: this host.
        timeout: seconds to wait.

    Raises:
        EngineDead: no connection was accepted in time; the message has the last reason.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((site.host, site.port), max(left, POLL)).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() + POLL > deadline:
            raise EngineDead(
                f"{site.name(site.index)} could not reach {site.name(0)} at {site.host}:"
                f"{site.port} within {timeout:.0f} s: {reason}"
            )
        time.sleep(POLL)
