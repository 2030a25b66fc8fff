"""Input and output of a batch: JSON lines in OpenAI's batch file format."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from glowplug.entrypoints.server.refused import REASONS

#: routes that a batch may use
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_ID_CHARS = 512  #: longest ``custom_id``
SERVER_FAULT = 500  #: HTTP statuses from here on are repeated by a resumed run


@dataclass(frozen=True)
class BatchRequest:
    """A request of the input file.

    Attributes:
        custom_id: its id, unique in the file.
        url: path of the route.
        body: body of the request.
    """

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BadLine:
    """A line of the input file that is no request.

    Attributes:
        custom_id: its id; None if it has none.
        code: machine-readable reason.
        message: reason, with the number of the line.
    """

    custom_id: str | None
    code: str
    message: str


class _Malformed(ValueError):
    """The error of a malformed line. ``code``: machine-readable reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def read_input(path: Path) -> Iterator[BatchRequest | BadLine]:
    """Yield the requests of an input file and its malformed lines, one at a time.

    Blank lines are left out.

    Raises:
        OSError: the file cannot be read.
    """
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            custom_id = None
            try:
                value = _object(line)
                custom_id = _custom_id(value)
                if custom_id in seen:
                    raise _Malformed("duplicate_custom_id", "custom_id was used by an earlier line")
                seen.add(custom_id)
                yield _request(custom_id, value)
            except _Malformed as error:
                yield BadLine(custom_id, error.code, f"line {number}: {error}")


def _object(line: bytes) -> dict[str, Any]:
    """Parse a line as a JSON object."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _Malformed("invalid_json", f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _Malformed("invalid_json", "not a JSON object")
    return value


def _custom_id(value: Mapping[str, Any]) -> str:
    """Return the id of a line."""
    given = value.get("custom_id")
    if not isinstance(given, str) or not 0 < len(given) <= MAX_ID_CHARS:
        raise _Malformed(
            "invalid_custom_id", f"custom_id must be a text of 1 to {MAX_ID_CHARS} characters"
        )
    return given


def _request(custom_id: str, value: Mapping[str, Any]) -> BatchRequest:
    """Return the request of a line with a valid id."""
    if value.get("method") != "POST":
        raise _Malformed("invalid_method", "method must be POST")
    url = value.get("url")
    if not isinstance(url, str) or url not in URLS:
        reason = REASONS.get(url) if isinstance(url, str) else None
        allowed = "url must be one of " + ", ".join(URLS)
        raise _Malformed("invalid_url", f"{allowed}; {reason}" if reason else allowed)
    body = value.get("body")
    if not isinstance(body, dict):
        raise _Malformed("invalid_body", "body must be an object")
    if body.get("stream"):
        raise _Malformed("unsupported_parameter", "body.stream: a batch has no streams")
    return BatchRequest(custom_id, url, body)


def error_line(bad: BadLine) -> dict[str, Any]:
    """Return the output line of a malformed input line."""
    error = {"code": bad.code, "message": bad.message}
    return _output_line(bad.custom_id, None, error)


def response_line(custom_id: str, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """Return the output line of an answered request."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _output_line(custom_id, response, None)


def _output_line(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


class OutputFile:
    """Context manager that appends lines to an output file.

    Each line is passed to the operating system as soon as it is complete. A second run with the
    same file is refused while this one has it open.

    Args:
        path: the file.
        resume: keep the answers of an earlier run; False: the file must be new or empty.

    Attributes:
        answered: ids of requests that the earlier run has answered.

    Raises:
        ValueError: the file has lines and ``resume`` is false, is in use, or is no output of a
            batch.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.answered: Set[str] = frozenset()
        self._file = path.open("ab")
        try:
            self._lock(path)
            if path.stat().st_size:
                self._take_over(path, resume)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line."""
        self._file.write(orjson.dumps(line) + b"\n")
        self._file.flush()

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path} is written by another run") from None

    def _take_over(self, path: Path, resume: bool) -> None:
        """Reduce the file to the answers of an earlier run, and read their ids.

        An incomplete last line, error lines and answers with a status of 500 or more are removed,
        so that their requests are repeated. The file is replaced only when its successor is
        complete.
        """
        if not resume:
            raise ValueError(
                f"{path} is not empty: give --resume to keep its answers and run the other "
                "requests, or another file"
            )
        kept = path.with_name(path.name + ".resumed")
        answered = set()
        with path.open("rb") as old, kept.open("wb") as new:
            for number, line in enumerate(old, 1):
                if not line.endswith(b"\n"):
                    break
                custom_id = _answered(line, f"{path}:{number}")
                if custom_id is not None and custom_id not in answered:
                    answered.add(custom_id)
                    new.write(line)
            new.flush()
            os.fsync(new.fileno())
        os.replace(kept, path)
        self._file.close()
        self._file = path.open("ab")
        self._lock(path)
        self.answered = answered


def _answered(line: bytes, place: str) -> str | None:
    """Return the id of an output line with a final answer; None for another output line.

    Raises:
        ValueError: it is no output line. ``place`` is "FILE:LINE".
    """
    try:
        value = orjson.loads(line)
        response = value["response"]
        final = response is not None and response["status_code"] < SERVER_FAULT
        return str(value["custom_id"]) if final else None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{place} is no line of a batch's output; nothing was changed") from None
