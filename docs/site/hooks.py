"""Hooks of the site: its first page, links to files, and the list of methods.

The README is the first page. Links to files that are no pages lead into the repository,
if `repo_url` of mkdocs.yml is set. `<!-- methods -->` becomes the entries of all
compression methods.
"""

import pathlib
import re

from mkdocs.structure.files import File

_ROOT = pathlib.Path(__file__).parents[2]
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s#]*)(#[^)\s]*)?\)")


def add_methods(markdown):
    """Replace `<!-- methods -->` with an entry for each compression method."""
    if "<!-- methods -->" not in markdown:
        return markdown
    from tf_dgc.compressors import METHODS

    methods = sorted(METHODS.values(), key=lambda method: method.__name__.lower())
    entries = [f"::: {method.__module__}.{method.__name__}" for method in methods]
    return markdown.replace("<!-- methods -->", "\n".join(entries))


def on_files(files, config):
    """Add the README as the first page."""
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    content = _LINK.sub(lambda m: _moved(m, config), text)
    files.append(File.generated(config, "index.md", content=content))
    return files


def _moved(match, config):
    """Return a link of the README as one of a page in `docs`."""
    text, path, anchor = match[1], match[2], match[3] or ""
    target = (_ROOT / path).resolve()
    if target.is_relative_to(_ROOT / "docs"):
        return f"[{text}]({path.removeprefix('docs/')}{anchor})"
    return _elsewhere(text, target, config)


def on_page_markdown(markdown, page, config, files):
    """Change links to what is no page, such as a source file."""
    if page.file.src_uri == "index.md":
        return markdown
    markdown = add_methods(markdown)
    folder = (pathlib.Path(config["docs_dir"]) / page.file.src_uri).parent

    def kept(match):
        target = (folder / match[2]).resolve() if match[2] else folder
        known = target.is_relative_to(config["docs_dir"]) and (
            target.suffix in (".md", ".svg") and target.exists()
        )
        if known or not match[2]:
            return match[0]
        return _elsewhere(match[1], target, config)

    return _LINK.sub(kept, markdown)


def _elsewhere(text, target, config):
    """Return a link into the repository, or its text if nobody said where that is."""
    if not config["repo_url"]:
        return text
    path = target.relative_to(_ROOT).as_posix()
    return f"[{text}]({config['repo_url'].rstrip('/')}/blob/main/{path})"
