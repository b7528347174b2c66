"""Commands as they stand in the documentation, and whether what they name is there."""

import argparse
import contextlib
import io
import pathlib
import re
import shlex
import subprocess

import pages

from tf_dgc.cli import main

_INLINE = re.compile(r"`((?:sudo )?(?:python (?:benchmarks|examples)/|tf-dgc )[^`]*)`")
_SCRIPTS = re.compile(r"(?:benchmarks|examples)/[\w/]+\.py")
_OTHERS = {"export", "pre-commit", "source"}  # they name nothing of this repository


def split(text):
    """Return the commands of a block of bash, as lists of words."""
    commands, begun = [], ""
    for line in text.splitlines():
        begun += line
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        try:
            words = shlex.split(begun, comments=True)
        except ValueError:  # a quotation goes on in the next line
            begun += "\n"
            continue
        commands.append(words)
        begun = ""
    assert not begun, begun
    return [w for words in commands for w in map(_program, _parts(words)) if w]


def _parts(words):
    parts = [[]]
    for word in words:
        if word in ("&&", "||", "|", ";"):
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _program(words):
    """Return a command from its program on."""
    words = list(words)
    while words and (words[0] == "sudo" or re.match(r"[A-Z_]+=", words[0])):
        words.pop(0)
    return words


def inline(page):
    """Return commands within sentences of a page, whose values may be placeholders."""
    text = page.read_text(encoding="utf-8")
    return [_program(text.split()) for text in _INLINE.findall(text)]


def script(command):
    """Return the script of this repository that a command runs and its arguments.

    Returns:
        A pair; None if it runs no such script.
    """
    for at, word in enumerate(command):
        if _SCRIPTS.fullmatch(word) and command[0] in ("python", "tf-dgc"):
            return word, command[at + 1 :]
    return None


def fault(command):
    """Return what is wrong with a command of a block, None if nothing is found.

    What is passed to scripts of this repository is not looked at here.
    """
    program, *arguments = command
    if program in ("tf-dgc", "pip", "make"):
        return {"tf-dgc": _tf_dgc, "pip": _pip, "make": _make}[program](arguments)
    if program in ("python", "python3", "pytest", "bash", "sbatch") or "/" in program:
        return next(filter(None, map(_missing, command)), None)
    return None if program in _OTHERS else f"{program} is not known"


def unknown_options(command):
    """Return options of `tf-dgc` that a command names and there are not."""
    known = _options(main._parser())
    before = command[: command.index("-m") + 2] if "-m" in command else command
    named = [w.split("=")[0] for w in before if re.match(r"--\w", w)]
    return [] if script(command) else [n for n in named if n not in known]


def _options(parser):
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {name for p in action.choices.values() for name in _options(p)}
    return found


def _tf_dgc(arguments):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            options = main._parser().parse_args(arguments)
        except SystemExit:
            return said.getvalue()
    if options.command == "run" and options.module and options.script == "tf_dgc":
        return _tf_dgc(options.args)
    return None


def _pip(arguments):
    extras = [e for a in arguments for e in re.findall(r"\[([\w,]+)\]", a)]
    text = (pages.ROOT / "pyproject.toml").read_text()
    known = re.findall(
        r"^(\w+) = \[$", text.partition("optional-dependencies]")[2], re.M
    )
    missing = {e for group in extras for e in group.split(",")} - {*known}
    return f"no extra {sorted(missing)}" if missing else None


def _make(arguments):
    tried = subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=pages.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return tried.stderr if tried.returncode else None


def _missing(word):
    """Return that a path is not there; names without a folder are the reader's."""
    is_path = re.fullmatch(r"(?:\w[\w.]*/)+[\w.]*", word)
    if not is_path or pathlib.Path(pages.ROOT / word).exists() or ".venv" in word:
        return None
    return f"{word} is not there"
