"""The pages of the documentation, and the blocks of code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md", *(ROOT / "docs").glob("*.md")]
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+?) -->\n)?^ *```(?P<language>\w+)\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
_FILE = re.compile(r"# (\S+/\S+\.py)\n")


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    not_run: str
    """Why no test runs it; empty for a block that a test runs."""

    @property
    def file(self) -> str:
        """Path that a Python block is to be written to: its first line names it."""
        match = _FILE.match(self.text) if self.language == "python" else None
        return match[1] if match else ""

    @property
    def commands(self) -> list[str]:
        """Lines of a shell block; one that ends in a backslash continues."""
        lines = (line.strip() for line in self.text.replace("\\\n", " ").splitlines())
        return [line for line in lines if line and not line.startswith("#")]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, *languages: str) -> list[Block]:
    """Blocks of one page in the order of the page; of all languages, if none is named."""
    text = (ROOT / page).read_text()
    found = (
        Block(page, text.count("\n", 0, match.start("text")), match["language"], match["text"], match["reason"] or "")
        for match in _BLOCK.finditer(text)
    )
    return [block for block in found if not languages or block.language in languages]


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in NAMES for block in blocks(page, *languages)]


def sections(page: str) -> dict[str, str]:
    """Text below each heading of the second and third level."""
    parts = re.split(r"^#{2,3} (.+)$", (ROOT / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str) -> list[list[str]]:
    """Cells of the tables in a text, without their heads."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("|"):
            found.append([cell.strip() for cell in line.strip("|").replace("\\|", "\0").split("|")])
    return [[cell.replace("\0", "|") for cell in row] for row in found if not set("".join(row)) <= set("-: ")]
