"""Fixtures of several files: a tiny model with a next-token layer, and its answers without drafts.

A file that defines a fixture of the same name uses its own.
"""

from __future__ import annotations

from tests.support.draft_requests import featured, folder, greedy, plain

__all__ = ["featured", "folder", "greedy", "plain"]
