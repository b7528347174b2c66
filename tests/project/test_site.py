"""The documentation's site: entries of public names, links, and a strict build."""

import html.parser
import importlib.util
import json
import os
import pathlib
import re
import sys
import types
import urllib.parse

import programs
import pytest

import tf_dgc

ROOT = pathlib.Path(__file__).parents[2]
MODULES = {"callbacks", "cluster", "compressors", "collectives", "saving", "schedules"}


def load_hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/site/hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


def entries():
    pages = (ROOT / "docs" / "reference").glob("*.md")
    texts = [load_hooks().add_methods(page.read_text()) for page in pages]
    return [e for text in texts for e in re.findall(r"^::: (\S+)$", text, re.M)]


def test_entries_match_public_names():
    """Every entry names an object, and every public name except modules has one."""
    all_entries = entries()
    assert len(all_entries) == len({*all_entries})
    for entry in all_entries:
        module, _, name = entry.rpartition(".")
        __import__(module)
        assert hasattr(sys.modules[module], name), entry
    names = {entry.rpartition(".")[2] for entry in all_entries}
    assert {*tf_dgc.__all__} - MODULES <= names
    assert {type(m()).__name__ for m in tf_dgc.compressors.METHODS.values()} <= names
    assert {*tf_dgc.callbacks.__all__} <= names


def test_every_page_is_in_the_menu():
    menu = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text())
    docs = ROOT / "docs"
    pages = {p.relative_to(docs).as_posix() for p in docs.rglob("*.md")}
    assert {p for p in pages if not p.startswith("decisions/")} - {*menu} == set()


class _Page(html.parser.HTMLParser):
    """Links and anchors of a page of the site."""

    def __init__(self, path):
        super().__init__()
        self.path, self.links, self.anchors = path, set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.links |= {values[k] for k in ("href", "src") if values.get(k)}
        self.anchors |= {values[k] for k in ("id", "name") if values.get(k)}


def broken_links(site):
    """Return broken links within a built site, with their pages."""
    pages = {path: _Page(path) for path in site.rglob("*.html")}
    return [
        f"{path.relative_to(site)}: {target}"
        for path, page in pages.items()
        if path.name != "404.html"  # served in any folder
        for target in page.links
        if not urllib.parse.urlsplit(target).scheme
        and not _is_valid_link(path, target, pages)
    ]


def _is_valid_link(path, target, pages):
    name, _, anchor = target.partition("#")
    file = (path.parent / urllib.parse.unquote(name)).resolve() if name else path
    file = file / "index.html" if file.is_dir() else file
    has_anchor = file not in pages or not anchor or anchor in pages[file].anchors
    return file.is_file() and has_anchor


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b/#here"><a href="#no"><img src="c.svg">'
    )
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "index.html").write_text('<p id="here"><a href="../a.html">')
    assert sorted(broken_links(tmp_path)) == ["a.html: #no", "a.html: c.svg"]


needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None and not os.environ.get("CI"),
    reason="needs the extra `docs`",
)


@needs_mkdocs
@pytest.mark.parametrize(
    ("repository", "example", "rows"),
    [
        (None, "train.py", "[records](decisions/README.md), rows.json"),
        (
            "https://example.org/tf_dgc/",
            "[train.py](https://example.org/tf_dgc/blob/main/examples/cluster/train.py)",
            "[records](decisions/README.md), "
            "[rows.json](https://example.org/tf_dgc/blob/main/study/rows/a.json)",
        ),
    ],
)
def test_links_to_other_files_lead_to_the_repository(repository, example, rows):
    """If the repository is unknown, they become plain text."""
    hooks = load_hooks()
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="page.md"))
    config = {"docs_dir": str(ROOT / "docs"), "repo_url": repository}
    text = "[train.py](../examples/cluster/train.py); [records](decisions/README.md), "
    text += "[rows.json](../study/rows/a.json); [here](#here)"
    markdown = hooks.on_page_markdown(text, page, config, None)
    assert markdown == f"{example}; {rows}; [here](#here)"


@pytest.mark.slow
@needs_mkdocs
def test_site_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
    finished = programs.run(
        [*command, tmp_path, "-f", ROOT / "mkdocs.yml"], merged=True
    )
    assert finished.returncode == 0, finished.stdout
    first_page = (tmp_path / "index.html").read_text()
    assert "Distributed Keras training" in first_page
    reference = (tmp_path / "reference/optimizers/index.html").read_text()
    assert "DGCOptimizer" in reference
    assert "&gt;&gt;&gt; </span>" in reference and "<blockquote" not in reference
    assert broken_links(tmp_path.resolve()) == []
    index = json.loads((tmp_path / "search/search_index.json").read_text())
    locations = {d["location"].partition("#")[0] for d in index["docs"] if d["text"]}
    pages = {path.parent for path in tmp_path.rglob("index.html")}
    indexed = {(tmp_path / location).resolve() for location in locations}
    assert {p for p in pages if p.resolve() not in indexed} == set()
    assert any("residual" in d["text"] for d in index["docs"])
    for entry in index["docs"]:  # decisions come last
        assert entry["location"].startswith("decisions/") == ("boost" in entry)
    assert 'href="site/extra.css"' in first_page
    assert {path.name for path in (tmp_path / "site").iterdir()} == {"extra.css"}
