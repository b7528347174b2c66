"""Statements that are made in two files agree."""

import ast
import pathlib
import re

import pages

ROOT = pathlib.Path(__file__).parents[2]


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def pins(name):
    return set(re.findall(r'"([\w-]+==[\w.]+)"', text(name)))


def test_hooks_use_the_pinned_tools():
    assert {p.split("==")[0] for p in pins("pyproject.toml")} == {
        "import-linter",
        "mypy",
        "ruff",
    }
    assert pins(".pre-commit-config.yaml") == pins("pyproject.toml")


def test_the_version_is_cited():
    (version,) = re.findall(r'^version = "(.+)"', text("pyproject.toml"), re.M)
    assert f"\nversion: {version}\n" in text("CITATION.cff")


def test_links_of_the_docs_lead_somewhere():
    """Files, and headings of them."""
    assert len(pages.PAGES) > 10
    missing = [
        f"{page.name}: {target}"
        for page in pages.PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if not target.startswith("https://") and not leads(page, target)
    ]
    assert missing == []


def test_tests_that_docs_name_are_there():
    files = [*(ROOT / "tests").rglob("test_*.py")]
    files += (ROOT / "study" / "tests").glob("test_*.py")
    named = {n for p in pages.PAGES for n in re.findall(r"\btest_\w+", p.read_text())}
    known = {n for f in files for n in re.findall(r"def (test_\w+)", f.read_text())}
    assert len(named) > 50
    assert named - known - {f.stem for f in files} == {"test_on_batch"}  # of Keras


def test_environment_variables_have_one_table():
    """Those of the package, and of its building."""
    files = [*(ROOT / "tf_dgc").rglob("*.py"), *(ROOT / "custom_ops").glob("*.py")]
    files += [*(ROOT / "custom_ops" / "cpu").glob("*.cc")]
    read = {
        name
        for file in files
        for name in re.findall(r'"(TF_DGC_[A-Z_]+)"', file.read_text(encoding="utf-8"))
    }
    assert len(read) > 10
    assert {*re.findall(r"^\| `(TF_DGC_\w+)` \| .* \|", section(), re.M)} == read


def section():
    _, _, rest = text("docs/using.md").partition("\n## Environment variables\n")
    return rest.partition("\n## ")[0]


def leads(page, target):
    name, _, anchor = target.partition("#")
    file = page.parent / name if name else page
    return file.exists() and (not anchor or anchor in anchors(file))


def anchors(page):
    """Return the headings as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_argument_lines_begin_with_a_noun():
    """`of the step` says nothing; `number of the step` does."""
    first = "of|for|that|as|by|with|from|which|whose|what|how|where|when|before|to|in"
    line = re.compile(rf"^ +\**\w+: (?:{first})\b.*|^ +\**\w+: \w\.$")
    found = [
        f"{file.relative_to(ROOT)}: {text.strip()}"
        for file in sorted((ROOT / "tf_dgc").rglob("*.py"))
        for block in re.findall(
            r'^ +(?:Args|Attributes):\n((?: +(?!""")\S.*\n)+)',
            file.read_text(encoding="utf-8"),
            re.M,
        )
        for text in block.splitlines()
        if line.match(text)
    ]
    assert found == []


def test_private_names_of_others_have_one_room():
    """Which knows versions: `tf_dgc/_internals`."""
    private = "keras.src", "tensorflow.python"
    folders = "tf_dgc", "benchmarks", "examples", "study"
    found = [
        str(file.relative_to(ROOT))
        for folder in folders
        for file in sorted((ROOT / folder).rglob("*.py"))
        if "_internals" not in file.parts
        and any(name in file.read_text(encoding="utf-8") for name in private)
    ]
    assert found == []


def test_autograph_can_convert_all_functions():
    """A user's `tf.function` has those converted that it calls; and a warning else.

    AutoGraph makes a function of each branch, where an annotated name cannot be one of
    the function around it.
    """
    found = [
        f"{path.name}:{statement.lineno}"
        for path in sorted((ROOT / "tf_dgc").rglob("*.py"))
        for branch in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(branch, ast.If | ast.For | ast.While)
        for statement in ast.walk(branch)
        if isinstance(statement, ast.AnnAssign)
    ]
    assert found == []
