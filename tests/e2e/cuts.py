"""Ways to split the same work into steps; greedy tokens and their logits are the same for all
of them.
"""

from __future__ import annotations

from typing import Any

CUTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "no_overlap": {"scheduler": {"overlap": False}},
    "no_cache": {"cache": {"use": "none"}},
    "chunked": {"scheduler": {"chunk_size": 7}},
    "chunked_one": {"scheduler": {"chunk_size": 1, "max_running_requests": 3}},
    "unmixed": {"scheduler": {"mixed": False, "chunk_size": 16}},
    "page_1": {"attention": {"page_size": 1}},
    "page_64": {"attention": {"page_size": 64}},
    "two_rows": {"scheduler": {"max_running_requests": 2}},
}
