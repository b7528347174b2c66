"""Pages of the documentation, and the blocks of code that stand in them."""

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
    """A block between fences; `reason` says why it is not run, if it is not."""

    page: pathlib.Path
    line: int  # of its first line
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
    """Return the blocks of a page, of some languages where any are given."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(
            page,
            text.count("\n", 0, match.start("text")) + 1,
            match["language"],
            match["text"],
            match["reason"],
        )
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if not languages or block.language in languages]


def with_blocks(*languages):
    return [page for page in PAGES if blocks(page, *languages)]
