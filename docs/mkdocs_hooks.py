"""Hooks of the documentation site (mkdocs.yml): pages from outside docs/, and links that lead out of the site.

README.md, examples/README.md and CHANGELOG.md are pages of the site without a copy in docs/. A link from a page to a
source file is right on a code host and has no target on the site: there its text remains.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "examples/README.md": "examples.md", "CHANGELOG.md": "changelog.md"}
"""Files outside docs/ -> pages of the site."""
HEAD = {"index.md": "---\nhide: [navigation]\n---\n"}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=HEAD.get(page, "") + (ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    sources = {name: source for source, name in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return with_site_links(markdown, source)


def with_site_links(markdown: str, source: str) -> str:
    """The text of a file of the repository, with the links that it has on the site."""

    def rewritten(match: re.Match[str]) -> str:
        mark, text, path, anchor = match[1], match[2], match[3], match[4] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target in PAGES:
            return f"{mark}[{text}]({PAGES[target]}{anchor})"
        if target.startswith("docs/"):
            name = text.removeprefix("docs/").removesuffix(".md") if text == path else text
            return f"{mark}[{name}]({target.removeprefix('docs/')}{anchor})"
        return f"`{text}`" if "/" in text and "`" not in text else text

    return _LINK.sub(rewritten, markdown)
