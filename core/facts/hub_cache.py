"""Models in the local cache of the Hugging Face hub's tools. Nothing is downloaded.

The cache has a folder ``models--ORG--NAME`` for each model, with ``refs/BRANCH`` (the commit of a
branch or tag), ``snapshots/COMMIT`` (the files, as links) and ``blobs`` (their contents).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from glowplug.core.errors import FactsError
from glowplug.core.facts.safetensors_header import INDEX_NAME

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
DEFAULT_REVISION = "main"
NAMES_SHOWN = 6  #: missing files that a message names
_REVISION = re.compile(r"[\w][\w./-]{0,199}")


def hub_cache() -> Path:
    """Return the folder of the cache: that of the hub's own tools.

    NOTE: HF_HUB_CACHE, HF_HOME and XDG_CACHE_HOME are these tools' own variables for its place.
    """
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def is_hub_id(name: str) -> bool:
    """Return whether ``name`` is the id of a model of the hub, and no file or folder here."""
    return bool(HUB_ID.fullmatch(name)) and not os.path.exists(name)


def hub_snapshot(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of a downloaded model; None if nothing of it was downloaded.

    Args:
        name: id of the model.
        revision: branch, tag or commit; None: the branch "main", or the newest snapshot if the
            cache states no branch.

    Raises:
        FactsError: the revision was not downloaded, or files of it are missing.
    """
    if not HUB_ID.fullmatch(name):
        return None
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    if not (folder / "snapshots").is_dir():
        return None
    found = _snapshot(folder, revision)
    if found is None:
        held = ", ".join(_revisions(folder)[:NAMES_SHOWN]) or "none"
        raise FactsError(
            f"revision {(revision or DEFAULT_REVISION)[:200]!r} of {name} was not downloaded; "
            f"downloaded are: {held}",
            f"{_command(name, revision)}, or another revision",
        )
    missing = missing_files(found)
    if missing:
        more = f" and {len(missing) - NAMES_SHOWN} more" if len(missing) > NAMES_SHOWN else ""
        raise FactsError(
            f"the download of {name} is incomplete; missing: "
            + ", ".join(missing[:NAMES_SHOWN])
            + more,
            f"{_command(name, revision)} continues it",
        )
    return found


def missing_files(snapshot: Path) -> list[str]:
    """Return the names of the files that a snapshot lacks, sorted.

    These are config.json, weights that the index of the safetensors files or the listing of the
    download names, and links whose content was not downloaded.
    """
    indexed = _indexed(snapshot / INDEX_NAME)
    wanted = {"config.json", *(indexed or _listed_weights(snapshot))}
    wanted |= {
        path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_symlink()
    }
    return sorted(name for name in wanted if not (snapshot / name).exists())


def _snapshot(folder: Path, revision: str | None) -> Path | None:
    """Return the snapshot of a revision in the cache's folder of a model; None if there is none."""
    snapshots = folder / "snapshots"
    wanted = revision or DEFAULT_REVISION
    if not _REVISION.fullmatch(wanted) or ".." in wanted:
        return None
    if "/" not in wanted and (snapshots / wanted).is_dir():
        return snapshots / wanted
    ref = folder / "refs" / wanted
    if ref.is_file():
        commit = ref.read_text(encoding="utf-8", errors="replace").strip()
        held = commit and "/" not in commit and (snapshots / commit).is_dir()
        return snapshots / commit if held else None
    if revision is not None or any((folder / "refs").glob("*")):
        return None
    found = [path for path in snapshots.iterdir() if path.is_dir()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _revisions(folder: Path) -> list[str]:
    """Return the branches, tags and commits of a model that the cache holds."""
    refs = folder / "refs"
    named = sorted(p.relative_to(refs).as_posix() for p in refs.rglob("*") if p.is_file())
    return [*named, *sorted(path.name for path in (folder / "snapshots").iterdir())]


def _indexed(index: Path) -> set[str]:
    """Return the names of the files in an index of safetensors files; none if it is not valid."""
    files = _json_object(index).get("weight_map")
    names = files.values() if isinstance(files, dict) else ()
    return {name for name in names if isinstance(name, str) and "/" not in name}


def _listed_weights(snapshot: Path) -> set[str]:
    """Return the safetensors files at the top of the listing that the hub's tool has kept.

    NOTE: releases of the tool before 2 keep no listing.
    """
    listing = snapshot.parents[1] / "trees" / f"{snapshot.name}.json"
    files = _json_object(listing).get("files")
    names = files if isinstance(files, dict) else ()
    return {name for name in names if name.endswith(".safetensors") and "/" not in name}


def _json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _command(name: str, revision: str | None) -> str:
    """Return the command that downloads a model."""
    return f"glowplug download {name}" + (f" --revision {revision[:200]}" if revision else "")
