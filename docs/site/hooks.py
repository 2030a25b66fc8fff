"""Hooks of mkdocs for the docs site: folders in the navigation, and files outside docs/ as pages.

A page of docs/ may link each file or folder of the repository, as a git host shows it. The site has
a page for each of these under ``repository/``: Markdown as it is, other text as a listing, a folder
as its README.md and the list of its files. Each link works without another host.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path[:0] = [str(ROOT)]

from tests.support.markdown import headings, links, slug  # noqa: E402
from tests.support.site_navigation import REPOSITORY, expanded, pages_of  # noqa: E402

LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".yaml": "yaml", ".yml": "yaml"}
HIDDEN = re.compile(r"(^|/)(\.|__pycache__|[^/]*\.egg-info)")
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand the folders of the navigation, and give headings the anchors of git hosts."""
    config.nav = expanded(config.nav or [], DOCS)
    config.mdx_configs.setdefault("toc", {})["slugify"] = lambda text, separator: slug(text)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file and folder that is linked and is not copied from docs/."""
    waiting = [
        ROOT / uri.removeprefix(REPOSITORY)
        for uri in pages_of(config.nav or [])
        if uri.startswith(REPOSITORY)
    ]
    for file in files.documentation_pages():
        waiting += targets(DOCS / file.src_uri, file.content_string)
    while waiting:
        path = waiting.pop()
        uri = site_uri(path)
        if files.get_file_from_path(uri) is not None or not path.exists():
            continue
        content = page_content(path)
        if content is None:
            files.append(File.generated(config, uri, abs_src_path=str(path)))
            continue
        files.append(File.generated(config, uri, content=content))
        if path.is_dir() or path.suffix == ".md":
            waiting += targets(origin(uri), content)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite what a git host and mkdocs read differently.

    Links to files get their places on the site; repeated headings get explicit anchors; escaped
    bars in the code of tables lose their backslash.
    """
    here = page.file.src_uri
    edits = [(end, end, f" {{ #{name} }}") for end, name in headings(markdown) if repeated(name)]
    for link in links(markdown):
        if link.external or not link.path:
            continue
        uri = site_uri(target_of(origin(here), link.path))
        new = posixpath.relpath(uri, posixpath.dirname(here) or ".")
        edits.append((link.start, link.start + len(link.target.partition("#")[0]), new))
    for start, end, new in sorted(edits, reverse=True):
        markdown = markdown[:start] + new + markdown[end:]
    return re.sub(r"^\|.*\|$", unescaped, markdown, flags=re.MULTILINE)


def repeated(anchor: str) -> bool:
    """Return whether an anchor may have a number that tells equal headings apart."""
    return re.search(r"-\d+$", anchor) is not None


def unescaped(row: re.Match[str]) -> str:
    """Return a table's row without the backslashes of bars in code."""
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0])


def origin(uri: str) -> Path:
    """Return the file to whose folder the links of a page are relative."""
    if uri.startswith(REPOSITORY):
        return ROOT / uri.removeprefix(REPOSITORY)
    return DOCS / uri


def target_of(page: Path, path: str) -> Path:
    """Return the file or folder that ``path`` of a page means."""
    return (page.parent / path).resolve()


def targets(page: Path, text: str) -> list[Path]:
    """Return the files and folders that a page links."""
    return [target_of(page, link.path) for link in links(text) if link.path and not link.external]


def site_uri(path: Path) -> str:
    """Return where the site has a file or folder of the repository."""
    if path.is_relative_to(DOCS) and path.is_file() and path.suffix != ".py":
        return path.relative_to(DOCS).as_posix()
    uri = posixpath.normpath(f"{REPOSITORY}{path.relative_to(ROOT).as_posix()}")
    if path.is_dir():
        return f"{uri}/files.md"
    return uri if path.suffix == ".md" or text_of(path) is None else f"{uri}.md"


def text_of(path: Path) -> str | None:
    """Return a file's text; None for a file that is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def page_content(path: Path) -> str | None:
    """Return the Markdown of a file's or folder's page; None for a file that is not text."""
    if path.is_dir():
        return UNSEARCHED + folder_page(path)
    text = text_of(path)
    if text is None or path.suffix == ".md":
        return text
    fence = "`" * (1 + max((2, *map(len, re.findall(r"`+", text)))))
    language = LANGUAGES.get(path.suffix, "text")
    title = path.relative_to(ROOT).as_posix()
    return f"{UNSEARCHED}# {title}\n\n{fence}{language}\n{text}\n{fence}\n"


def folder_page(folder: Path) -> str:
    """Return a folder's README.md, if there is one, and the list of its files."""
    readme = folder / "README.md"
    title = folder.relative_to(ROOT).as_posix()
    head = readme.read_text(encoding="utf-8") if readme.exists() else f"# {title}\n"
    names = sorted(
        name
        for path in folder.rglob("*")
        if path.is_file() and not HIDDEN.search(name := path.relative_to(folder).as_posix())
    )
    return "\n".join([head, "## Files", "", *(f"- [{name}]({name})" for name in names), ""])
