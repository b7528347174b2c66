"""Pages of the documentation and their blocks of code."""

import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
_FOLDERS = "docs", "benchmarks", "study"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(page for folder in _FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))),
]
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block; `reason` says why it is not run, None if it is run."""

    page: pathlib.Path
    line: int  # number of its first line
    language: str
    text: str
    reason: str | None

    @property
    def place(self):
        return f"{name(self.page)}:{self.line}"

    def compiled(self):
        """Return code whose errors name page and line."""
        return compile("\n" * (self.line - 1) + self.text, str(self.page), "exec")


def name(page):
    return str(page.relative_to(ROOT))


def blocks(page, *languages):
    """Return the blocks of a page, optionally of some languages only."""
    text = page.read_text(encoding="utf-8")
    all_blocks = [
        Block(
            page,
            text.count("\n", 0, match.start("text")) + 1,
            match["language"],
            match["text"],
            match["reason"],
        )
        for match in _BLOCK.finditer(text)
    ]
    return [b for b in all_blocks if not languages or b.language in languages]


def with_blocks(*languages):
    return [page for page in PAGES if blocks(page, *languages)]
