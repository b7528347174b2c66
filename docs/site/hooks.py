"""Hooks of the site: the README is its first page, and links stay within it."""

import pathlib
import re

from mkdocs.structure.files import File

_ROOT = pathlib.Path(__file__).parents[2]
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files, config):
    """Add the README as the first page."""
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    content = _LINK.sub(lambda m: _moved(m, _ROOT / "docs"), text)
    files.append(File.generated(config, "index.md", content=content))
    return files


def _moved(match, docs):
    """Return a link of the README as one of a page in `docs`."""
    text, path, anchor = match[1], match[2], match[3] or ""
    if (_ROOT / path).resolve().is_relative_to(docs):
        return f"[{text}]({path.removeprefix('docs/')}{anchor})"
    return text


def on_page_markdown(markdown, page, config, files):
    """Leave the text of links to what is no page, such as a source file."""
    if page.file.src_uri == "index.md":
        return markdown
    folder = (pathlib.Path(config["docs_dir"]) / page.file.src_uri).parent

    def kept(match):
        target = (folder / match[2]).resolve() if match[2] else folder
        known = target.is_relative_to(config["docs_dir"]) and (
            target.suffix in (".md", ".svg") and target.exists()
        )
        return match[0] if known or not match[2] else match[1]

    return _LINK.sub(kept, markdown)
