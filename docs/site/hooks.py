"""Hooks of the site: links to files, and the list of methods.

Links to files that are no pages lead into the repository, if `repo_url` of mkdocs.yml
is set. `<!-- methods -->` becomes the entries of all compression methods. The search
lists other pages before decisions.
"""

import pathlib
import re

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


def on_page_markdown(markdown, page, config, files):
    """Change links to what is no page, such as a source file."""
    if page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"boost": 0.1}
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
