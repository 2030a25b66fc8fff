"""Token ids out of range have the same error code wherever they are found; other numbers do not."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from glowplug.entrypoints.server.errors import from_validation
from glowplug.entrypoints.server.protocol.completions import CompletionRequest


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": [5, -1]}, "invalid_token_id"),
        ({"prompt": [[5], [-1]]}, "invalid_token_id"),
        ({"prompt": "a", "stop_token_ids": [-3]}, "invalid_token_id"),
        ({"prompt": [1.5]}, None),
        ({"prompt": "a", "n": 0}, None),
        ({"prompt": "a", "top_p": 2}, None),
    ],
)
def test_an_id_out_of_range_has_its_error_code(fields: dict[str, Any], code: str | None) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"model": "m", **fields})
    error = from_validation(list(caught.value.errors()))
    assert (error.code, error.status) == (code, 400) and (error.param or "").startswith(
        list(fields)[-1]
    )
