"""Observers of ended requests, which plugins register through the hook ``request_observers``."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from glowplug.core.protocols import EndedRequest, RequestObserver
from glowplug.entrypoints.server.request_log import RequestRecord

logger = logging.getLogger("glowplug.server")


class RequestObservers:
    """The objects that plugins registered (hook ``request_observers``), called for each request.

    Args:
        observers: the objects.
        model: name of the model in the API.
    """

    def __init__(self, observers: Sequence[RequestObserver], model: str) -> None:
        self._observers = list(observers)
        self._model = model

    def ended(self, record: RequestRecord) -> None:
        """Call every observer if the request ran sequences.

        An observer that fails is logged and not called again.
        """
        if not self._observers or record.params is None:
            return
        request = self._ended_request(record)
        for observer in list(self._observers):
            try:
                observer.ended(request)
            except Exception:
                self._observers.remove(observer)
                logger.exception("%s failed and is not called again", type(observer).__name__)

    def close(self) -> None:
        """Close every observer."""
        for observer in self._observers:
            try:
                observer.close()
            except Exception:
                logger.exception("%s could not be closed", type(observer).__name__)

    def _ended_request(self, record: RequestRecord) -> EndedRequest:
        """Return the data of a record that observers receive."""
        assert record.params is not None
        return EndedRequest(
            id=record.id,
            job=record.job or record.id,
            model=self._model,
            route=record.route,
            status=record.status,
            streamed=record.streamed,
            started=time.time() - (time.monotonic() - record.started),
            seconds=record.seconds,
            first_token=None if record.first is None else record.first - record.started,
            queue=record.times.queue,
            prefill=record.times.prefill,
            decode=record.times.decode,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            cached_tokens=sum(record.cached.values()),
            sequences=record.sequences,
            params=record.params,
            finish_reasons=tuple(record.finish),
            error=record.code,
            trace=record.trace,
        )
