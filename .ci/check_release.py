"""Whether what an index offers is what a tag holds.

python .ci/check_release.py TAG [INDEX]

INDEX is the address of a simple index (PyPI's, if there is none) or a folder of files.
All files of the tag's version are looked at, source distribution and wheels: each holds
the tag's files, to the byte, and nothing else; a wheel also a library for every minor
version of TensorFlow that the tag supports, built of the tag's sources.
"""

import hashlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator

Files = dict[str, bytes]
_MADE_BY_SETUPTOOLS = r"PKG-INFO|setup\.cfg|[^/]*\.egg-info/.*"
_PACKAGE = r"tf_dgc/.*\.(py|typed)|tf_dgc/cli/tables\.json"
_NEEDED = rf"{_PACKAGE}|custom_ops/.*|pyproject\.toml|setup\.py|README\.md"
_NATIVE = r"tf_dgc/_native/([\d.]+)/(libtf_dgc_ops\.so|stamp\.json)"


def main() -> None:
    """Print what does not fit; the exit status is 1 if there is anything."""
    tag, *index = sys.argv[1:]
    problems = check(of_tag(tag), tag, *index)
    print("\n".join(problems) or f"What there is is what {tag} holds.")
    sys.exit(bool(problems))


def check(tagged: Files, tag: str, index: str = "https://pypi.org/simple") -> list[str]:
    """Return what does not fit, a sentence each.

    Args:
        tagged: contents of the tag's files, by path.
        tag: name of the tag, or of any commit.
        index: address of a simple index, or path of a folder.
    """
    version = _find(r'^version = "(.+)"$', tagged["pyproject.toml"])
    problems = []
    if re.match(r"v\d", tag) and tag != f"v{version}":
        problems.append(f"{tag} holds version {version}")
    if re.match(r"v\d", tag) and not _find(
        rf"^## {re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)$", tagged["CHANGELOG.md"]
    ):
        problems.append(f"CHANGELOG.md has no date for {version}")
    offered = dict(offers(index, version))
    for kind in (".tar.gz", ".whl"):
        if not any(name.endswith(kind) for name in offered):
            problems.append(f"{index} offers no {kind} of {version}")
    for name, content in offered.items():
        look = in_wheel if name.endswith(".whl") else in_source
        problems += [f"{name}: {problem}" for problem in look(content, tagged)]
    return problems


def of_tag(tag: str) -> Files:
    """Return the contents of a tag's files, by path."""
    root = pathlib.Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "archive", "--format=tar", tag]
    return _unpack(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def offers(index: str, version: str) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of every file of a version."""
    ours = re.compile(rf"tf_dgc-{re.escape(version)}(\.tar\.gz|-.*\.whl)")
    if os.path.isdir(index):
        for path in sorted(pathlib.Path(index).iterdir()):
            if ours.fullmatch(path.name):
                yield path.name, path.read_bytes()
        return
    page = f"{index}/tf-dgc/"
    for link in re.findall(r'href="([^"]+)"', _get(page).decode()):
        address = urllib.parse.urldefrag(urllib.parse.urljoin(page, link)).url
        name = urllib.parse.unquote(address.rpartition("/")[2])
        if ours.fullmatch(name):
            yield name, _get(address)


def in_source(content: bytes, tagged: Files) -> Iterator[str]:
    """Yield what does not fit in a source distribution."""
    files = {name.partition("/")[2]: data for name, data in _unpack(content).items()}
    made = re.compile(_MADE_BY_SETUPTOOLS)
    ours = {name: data for name, data in files.items() if not made.fullmatch(name)}
    yield from _differences(ours, tagged, _NEEDED)


def in_wheel(content: bytes, tagged: Files) -> Iterator[str]:
    """Yield what does not fit in a wheel."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        files = {name: archive.read(name) for name in names}
    native = {name: data for name, data in files.items() if re.fullmatch(_NATIVE, name)}
    ours = {
        name: data
        for name, data in files.items()
        if ".dist-info/" not in name and name not in native
    }
    yield from _differences(ours, tagged, _PACKAGE)
    yield from _libraries(native, tagged)


def _libraries(native: Files, tagged: Files) -> Iterator[str]:
    found = {re.fullmatch(_NATIVE, name)[1] for name in native}
    supported = r'^  "tensorflow>=2\.(\d+),<2\.(\d+)",$'
    first, beyond = re.search(
        supported, tagged["pyproject.toml"].decode(), re.M
    ).groups()
    needed = {f"2.{minor}" for minor in range(int(first), int(beyond))}
    if found != needed:
        yield f"libraries are for {sorted(found)}, not for {sorted(needed)}"
    for minor in sorted(found & needed):
        folder = f"tf_dgc/_native/{minor}"
        library = native.get(f"{folder}/libtf_dgc_ops.so", b"")
        stamp = json.loads(native.get(f"{folder}/stamp.json", b"{}"))
        if not stamp.get("tensorflow", "").startswith(f"{minor}."):
            yield f"the library of {minor} is for {stamp.get('tensorflow')}"
        if stamp.get("sha256") != hashlib.sha256(library).hexdigest():
            yield f"the library of {minor} is not the one of its stamp"
        if stamp.get("sources") != _source_hash(tagged):
            yield f"the library of {minor} was built of other sources"


def _source_hash(tagged: Files) -> str:
    """Return what `custom_ops/builder.py` stamps."""
    text = tagged["custom_ops/builder.py"].decode()
    names = re.findall(r'"(\w+)"', re.search(r"_COMPILED = \((.*)\)", text)[1])
    compiled = [("custom_ops", name) for name in names]
    digest = hashlib.sha256()
    for path in sorted(map(pathlib.PurePosixPath, tagged)):
        if len(path.parts) == 3 and path.parts[:2] in compiled:
            digest.update(path.name.encode() + b"\0" + tagged[str(path)])
    return digest.hexdigest()


def _differences(ours: Files, tagged: Files, needed: str) -> Iterator[str]:
    """Yield which files differ, which are not the tag's, and which are missing."""
    for name, data in ours.items():
        if tagged.get(name) != data:
            yield f"{name} {'differs' if name in tagged else 'is not of the tag'}"
    for name in tagged.keys() - ours.keys():
        if re.fullmatch(needed, name):
            yield f"{name} is missing"


def _find(pattern: str, text: bytes) -> str:
    found = re.search(pattern, text.decode(), re.M)
    return found[1] if found else ""


def _get(address: str) -> bytes:
    with urllib.request.urlopen(address) as reply:
        return reply.read()


def _unpack(content: bytes) -> Files:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}


if __name__ == "__main__":
    main()
