"""Commands as they stand in the documentation, and whether what they name is there."""

import argparse
import contextlib
import io
import json
import pathlib
import re
import shlex
import subprocess
import sys

import pages

from tf_dgc.cli import main

_INLINE = re.compile(
    r"`((?:sudo )?(?:python (?:benchmarks|examples|study)/|tf-dgc )[^`]*)`"
)
_SCRIPT = re.compile(r"(benchmarks|examples|study)/[\w/]+\.py")
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


def in_blocks():
    """Return (place, command) for the commands in blocks of all pages."""
    return [
        (block.place, command)
        for page in pages.with_blocks("bash")
        for block in pages.blocks(page, "bash")
        for command in split(block.text)
    ]


def in_sentences():
    """Return (page, command) for the commands within sentences of all pages."""
    return [(pages.name(p), c) for p in pages.PAGES for c in inline(p)]


def script(command):
    """Return the script of this repository that a command runs and its arguments.

    Returns:
        A pair; None if it runs no such script.
    """
    for at, word in enumerate(command):
        if _SCRIPT.fullmatch(word) and command[0] in ("python", "tf-dgc"):
            return word, command[at + 1 :]
    return None


def of_scripts(*folders):
    """Return (place, [script, arguments, whether values count]) of all commands.

    Values count in blocks; those in sentences may be placeholders.

    Args:
        *folders: folders of the scripts, such as `benchmarks`.
    """
    every = [(*pair, True) for pair in in_blocks()]
    every += [(*pair, False) for pair in in_sentences()]
    found = [(place, script(command), whole) for place, command, whole in every]
    return [
        (place, [*run, whole])
        for place, run, whole in found
        if run and run[0].split("/")[0] in folders
    ]


def flag_faults(asked):
    """Return what is wrong with the flags of each command, None where nothing is.

    Args:
        asked: lists of a script, its arguments, and whether values count.
    """
    finished = subprocess.run(
        [sys.executable, pages.ROOT / "tests" / "support" / "script_flags.py"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=pages.ROOT,
        timeout=200,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout)


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
