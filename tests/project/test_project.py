"""Consistency of the repository's files."""

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


def test_citation_has_the_version():
    (version,) = re.findall(r'^version = "(.+)"', text("pyproject.toml"), re.M)
    assert f"\nversion: {version}\n" in text("CITATION.cff")


def test_links_of_the_docs_lead_to_files_and_headings():
    assert len(pages.PAGES) > 10
    missing = [
        f"{page.name}: {target}"
        for page in pages.PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if not target.startswith("https://") and not is_valid_link(page, target)
    ]
    assert missing == []


def test_docs_name_existing_tests():
    files = [*(ROOT / "tests").rglob("test_*.py")]
    files += (ROOT / "study" / "tests").glob("test_*.py")
    names = {n for p in pages.PAGES for n in re.findall(r"\btest_\w+", p.read_text())}
    files += pages.PAGES  # a page may define tests
    tests = {n for f in files for n in re.findall(r"def (test_\w+)", f.read_text())}
    assert len(names) > 50
    others = names - tests - {f.stem for f in files}
    assert others == {"test_device", "test_on_batch"}  # a folder; of Keras


def test_environment_variables_have_one_table():
    """Variables of the package and of its build."""
    files = [*(ROOT / "tf_dgc").rglob("*.py"), *(ROOT / "custom_ops").glob("*.py")]
    files += [*(ROOT / "custom_ops" / "cpu").glob("*.cc")]
    variables = {
        name
        for file in files
        for name in re.findall(r'"(TF_DGC_[A-Z_]+)"', file.read_text(encoding="utf-8"))
    }
    assert len(variables) > 10
    documented = re.findall(r"^\| `(TF_DGC_\w+)` \| .* \|", section(), re.M)
    assert {*documented} == variables


def section():
    _, _, rest = text("docs/limits.md").partition("\n## Environment variables\n")
    return rest.partition("\n## ")[0]


def is_valid_link(page, target):
    name, _, anchor = target.partition("#")
    file = page.parent / name if name else page
    return file.exists() and (not anchor or anchor in anchors(file))


def anchors(page):
    """Return the anchors of the headings, as on GitHub."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_argument_lines_begin_with_a_noun():
    """`number of the step` is allowed, `of the step` is not."""
    first = "of|for|that|as|by|with|from|which|whose|what|how|where|when|before|to|in"
    line = re.compile(rf"^ +\**\w+: (?:{first})\b.*|^ +\**\w+: \w\.$")
    lines = [
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
    assert lines == []


def test_private_names_are_used_only_in_internals():
    """Only `tf_dgc/_internals` uses private names of Keras and TensorFlow."""
    private = "keras.src", "tensorflow.python"
    folders = "tf_dgc", "benchmarks", "examples", "study"
    files = [
        str(file.relative_to(ROOT))
        for folder in folders
        for file in sorted((ROOT / folder).rglob("*.py"))
        if "_internals" not in file.parts
        and any(name in file.read_text(encoding="utf-8") for name in private)
    ]
    assert files == []


def test_autograph_can_convert_all_functions():
    """Annotated assignments in branches would cause warnings in a user's `tf.function`.

    AutoGraph turns each branch into a function, where an annotated name cannot belong
    to the surrounding function.
    """
    places = [
        f"{path.name}:{statement.lineno}"
        for path in sorted((ROOT / "tf_dgc").rglob("*.py"))
        for branch in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(branch, ast.If | ast.For | ast.While)
        for statement in ast.walk(branch)
        if isinstance(statement, ast.AnnAssign)
    ]
    assert places == []
