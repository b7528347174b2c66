"""`.ci/check_release.py` compares released files with the tag."""

import functools
import hashlib
import http.server
import importlib.util
import io
import json
import pathlib
import subprocess
import tarfile
import threading
import zipfile

import pytest

from tf_dgc import native_library

ROOT = pathlib.Path(__file__).parents[2]
TAG_FILES = {
    "pyproject.toml": b'version = "1.2.0"\n  "tensorflow>=2.20,<2.22",\n',
    "CHANGELOG.md": b"# Changelog\n\n## 1.2.0 (2026-01-31)\n",
    "README.md": b"...",
    "setup.py": b"setup()",
    "tf_dgc/__init__.py": b"",
    "tf_dgc/py.typed": b"",
    "custom_ops/builder.py": b'_COMPILED = ("cpu", "engine")\n',
    "custom_ops/cpu/a.cc": b"int a;",
    "custom_ops/tests/b.cc": b"int b;",
    "tests/test_a.py": b"",
}
SOURCES = hashlib.sha256(b"a.cc\0int a;").hexdigest()


@pytest.fixture(scope="module")
def release():
    file = ROOT / ".ci" / "check_release.py"
    spec = importlib.util.spec_from_file_location("check_release", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel_files(minors=("2.20", "2.21"), **stamp):
    files = {n: c for n, c in TAG_FILES.items() if n.startswith("tf_dgc/")}
    for minor in minors:
        sha256 = hashlib.sha256(minor.encode()).hexdigest()
        fields = {"tensorflow": f"{minor}.1", "sha256": sha256, "sources": SOURCES}
        folder = f"tf_dgc/_native/{minor}"
        files[f"{folder}/libtf_dgc_ops.so"] = minor.encode()
        files[f"{folder}/stamp.json"] = json.dumps({**fields, **stamp}).encode()
    return {**files, "tf_dgc-1.2.0.dist-info/METADATA": b"..."}


def source_files():
    files = {n: c for n, c in TAG_FILES.items() if not n.startswith("tests/")}
    return {**files, "PKG-INFO": b"...", "tf_dgc.egg-info/SOURCES.txt": b"..."}


def write(folder, wheel, source):
    with zipfile.ZipFile(folder / "tf_dgc-1.2.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tf_dgc/", b"")
        for name, content in wheel.items():
            archive.writestr(name, content)
    with tarfile.open(folder / "tf_dgc-1.2.0.tar.gz", "w:gz") as archive:
        for name, content in source.items():
            member = tarfile.TarInfo(f"tf_dgc-1.2.0/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_matching_release_has_no_problems(release, tmp_path):
    write(tmp_path, wheel_files(), source_files())
    assert release.check(TAG_FILES, "v1.2.0", str(tmp_path)) == []


@pytest.mark.parametrize(
    ("wheel", "source", "problem"),
    [
        ({"tf_dgc/__init__.py": b"changed"}, {}, "tf_dgc/__init__.py differs"),
        ({"tf_dgc/other.py": b""}, {}, "tf_dgc/other.py is not of the tag"),
        ({"tf_dgc/_native/2.20/libtf_dgc_ops.so": b""}, {}, "not the one of its stamp"),
        ({}, {"custom_ops/cpu/a.cc": b"int c;"}, "custom_ops/cpu/a.cc differs"),
        ({}, {"notes.txt": b""}, "notes.txt is not of the tag"),
    ],
)
def test_different_content(release, tmp_path, wheel, source, problem):
    write(tmp_path, {**wheel_files(), **wheel}, {**source_files(), **source})
    (reported,) = release.check(TAG_FILES, "v1.2.0", str(tmp_path))
    assert problem in reported


@pytest.mark.parametrize(
    ("wheel", "problem"),
    [
        (wheel_files(["2.21"]), "libraries are for ['2.21'], not for ['2.20', '2.21']"),
        (wheel_files(tensorflow="2.2.0"), "the library of 2.20 is for 2.2.0"),
        (
            wheel_files(sources="other"),
            "the library of 2.21 was built of other sources",
        ),
    ],
)
def test_wrong_libraries(release, tmp_path, wheel, problem):
    write(tmp_path, wheel, source_files())
    assert problem in str(release.check(TAG_FILES, "v1.2.0", str(tmp_path)))


def test_missing_files(release, tmp_path):
    source, wheel = source_files(), wheel_files()
    del source["custom_ops/cpu/a.cc"], wheel["tf_dgc/py.typed"]
    write(tmp_path, wheel, source)
    problems = release.check(TAG_FILES, "v1.2.0", str(tmp_path))
    assert sorted(text.partition(": ")[2] for text in problems) == [
        "custom_ops/cpu/a.cc is missing",
        "tf_dgc/py.typed is missing",
    ]


def test_missing_distributions(release, tmp_path):
    problems = release.check(TAG_FILES, "v1.2.0", str(tmp_path))
    assert [text.partition(" offers ")[2] for text in problems] == [
        "no .tar.gz of 1.2.0",
        "no .whl of 1.2.0",
    ]


def test_wrong_version_or_date(release, tmp_path):
    write(tmp_path, wheel_files(), source_files())
    problems = release.check(TAG_FILES, "v1.3.0", str(tmp_path))
    assert problems == ["v1.3.0 holds version 1.2.0"]
    undated = {"CHANGELOG.md": b"## 1.2.0 (unreleased)\n"}
    write(tmp_path, wheel_files(), {**source_files(), **undated})
    problems = release.check({**TAG_FILES, **undated}, "v1.2.0", str(tmp_path))
    assert problems == ["CHANGELOG.md has no date for 1.2.0"]
    assert release.check({**TAG_FILES, **undated}, "main", str(tmp_path)) == []


def test_package_index(release, tmp_path):
    folder = tmp_path / "tf-dgc"
    folder.mkdir()
    write(folder, {**wheel_files(), "tf_dgc/other.py": b""}, source_files())

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Handler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01]).start()
        index = f"http://127.0.0.1:{server.server_port}"
        (problem,) = release.check(TAG_FILES, "v1.2.0", index)
        server.shutdown()
    assert problem == "tf_dgc-1.2.0-py3-none-any.whl: tf_dgc/other.py is not of the tag"


def test_source_hash_equals_the_one_of_the_package(release):
    sources = ROOT / "custom_ops"
    files = [file for file in sources.rglob("*") if file.is_file()]
    contents = {str(file.relative_to(ROOT)): file.read_bytes() for file in files}
    assert release._source_hash(contents) == native_library._hash_sources(sources)


def test_files_of_a_tag(release, tmp_path, monkeypatch):
    for command in ("init -q", "add a.txt", "commit -q -m one", "tag v1"):
        (tmp_path / "a.txt").write_text("one")
        user = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *user, *command.split()], cwd=tmp_path, check=True)
    (tmp_path / "a.txt").write_text("two")
    monkeypatch.setattr(release, "__file__", str(tmp_path / ".ci" / "check_release.py"))
    assert release.of_tag("v1") == {"a.txt": b"one"}
