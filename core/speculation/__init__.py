"""Building blocks of speculative algorithms: trees of drafts and their verification."""
