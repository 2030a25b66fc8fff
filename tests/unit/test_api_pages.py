"""The pages of the APIs name every field that is supported or refused, and every event."""

from __future__ import annotations

import re
from collections.abc import Collection

import pytest
from pydantic import BaseModel

from glowplug.entrypoints.batch.files import URLS
from glowplug.entrypoints.server.messages import fields as messages
from glowplug.entrypoints.server.protocol.fields import SamplingFields
from glowplug.entrypoints.server.protocol.messages import MessagesRequest
from glowplug.entrypoints.server.protocol.response_request import ResponseRequest
from glowplug.entrypoints.server.responses import fields as responses
from glowplug.entrypoints.server.responses.answer import LAST_EVENT, TEXT_EVENTS
from tests.support.source_tree import ROOT

PAGES = ROOT / "docs" / "api"
ROW = re.compile(r"^\| ((?:`[^`]+`(?:, )?)+) \|", re.MULTILINE)
#: fields of every generating route that a table need not repeat
SHARED = SamplingFields.model_fields.keys() - {"temperature", "top_p", "stream", "n"}


def rows(page: str) -> set[str]:
    """Return the names in the first column of a page's tables."""
    text = (PAGES / page).read_text(encoding="utf-8")
    return {name for cells in ROW.findall(text) for name in re.findall(r"`([^`]+)`", cells)}


@pytest.mark.parametrize(
    ("page", "body", "refused"),
    [
        ("responses.md", ResponseRequest, responses.REFUSED),
        ("messages.md", MessagesRequest, {*messages.REFUSED, *messages.WITHOUT_EFFECT}),
    ],
)
def test_a_page_has_a_row_for_every_field(
    page: str, body: type[BaseModel], refused: Collection[str]
) -> None:
    own = body.model_fields.keys() - (SHARED - {"stream_options"}) - {"chat_template_kwargs"}
    if page == "messages.md":
        own -= {"stream_options"}
    assert sorted({*own, *refused} - rows(page)) == []


def test_the_page_of_responses_names_every_event() -> None:
    text = (PAGES / "responses.md").read_text(encoding="utf-8")
    kinds = [*LAST_EVENT.values(), *(f"{prefix}.delta" for prefix, _ in TEXT_EVENTS.values())]
    assert [kind for kind in kinds if kind not in text] == []


def test_the_page_of_batches_names_every_url() -> None:
    text = (PAGES / "batches.md").read_text(encoding="utf-8")
    assert [url for url in URLS if f"`{url}`" not in text] == []
