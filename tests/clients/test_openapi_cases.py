"""Cases that schemathesis generates from ``/openapi.json``, and the record of 3,000 of them."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.clients.openapi_cases import run, unanswered
from tests.e2e.serving import served
from tests.support.source_tree import ROOT

RECORD = ROOT / "docs" / "benchmarks" / "openapi-cases.json"
CASES = 3000  #: cases of the record
GENERATING = ("/v1/chat/completions", "/v1/completions", "/generate")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="pip install schemathesis to run it"
)
def test_generated_cases_find_no_fault() -> None:
    found = run(cases=1, examples=10)
    assert found["failures"] == []
    assert all(found["answers"][route].get("200") for route in GENERATING), found["answers"]


def test_the_record_has_every_route() -> None:
    """A new route needs a new record."""
    answers = json.loads(RECORD.read_text())["answers"]
    with served() as one:
        assert unanswered(one.url, answers) == []
        del answers["/generate"], answers["/v1/models/{model:path}"]
        assert unanswered(one.url, answers) == ["/generate", "/v1/models/{model}"]


def test_the_recorded_cases_found_no_fault() -> None:
    record = json.loads(RECORD.read_text())
    assert record["cases"] >= CASES and record["failures"] == []
    assert not any(
        int(status) == 500 or int(status) > 504
        for found in record["answers"].values()
        for status in found
    )
    for route in GENERATING:
        assert record["answers"][route]["200"] >= 20, route
