"""Finds commands in the documentation and checks what they name."""

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
_OTHERS = {"export", "pre-commit", "source"}  # name nothing of this repository


def split(text):
    """Return the commands of a block of bash, as lists of words."""
    commands, command = [], ""
    for line in text.splitlines():
        command += line
        if command.endswith("\\"):
            command = command[:-1]
            continue
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # a quotation goes on in the next line
            command += "\n"
            continue
        commands.append(words)
        command = ""
    assert not command, command
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
    """Return a command without variables and `sudo` before its program."""
    words = list(words)
    while words and (words[0] == "sudo" or re.match(r"[A-Z_]+=", words[0])):
        words.pop(0)
    return words


def inline(page):
    """Return commands in sentences of a page; their values may be placeholders."""
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
    for i, word in enumerate(command):
        if _SCRIPT.fullmatch(word) and command[0] in ("python", "tf-dgc"):
            return word, command[i + 1 :]
    return None


def of_scripts(*folders):
    """Return (place, [script, arguments, whether to check values]) of all commands.

    Values are checked in blocks; in sentences they may be placeholders.

    Args:
        *folders: folders of the scripts, such as `benchmarks`.
    """
    places = [(*pair, True) for pair in in_blocks()]
    places += [(*pair, False) for pair in in_sentences()]
    scripts = [(place, script(command), values) for place, command, values in places]
    return [
        (place, [*run, values])
        for place, run, values in scripts
        if run and run[0].split("/")[0] in folders
    ]


def flag_faults(runs):
    """Return the fault in the flags of each command; None for a correct one.

    Args:
        runs: lists of a script, its arguments, and whether to check values.
    """
    finished = subprocess.run(
        [sys.executable, pages.ROOT / "tests" / "support" / "script_flags.py"],
        input=json.dumps(runs),
        capture_output=True,
        text=True,
        cwd=pages.ROOT,
        timeout=200,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout)


def fault(command):
    """Return the fault of a command in a block, None for a correct one.

    Arguments of this repository's scripts are not checked here.
    """
    program, *arguments = command
    if program in ("tf-dgc", "pip", "make"):
        return {"tf-dgc": _tf_dgc, "pip": _pip, "make": _make}[program](arguments)
    if program in ("python", "python3", "pytest", "bash", "sbatch") or "/" in program:
        return next(filter(None, map(_missing, command)), None)
    return None if program in _OTHERS else f"{program} is not known"


def unknown_options(command):
    """Return options in a command that `tf-dgc` does not have."""
    valid = _options(main._parser())
    words = command[: command.index("-m") + 2] if "-m" in command else command
    options = [w.split("=")[0] for w in words if re.match(r"--\w", w)]
    return [] if script(command) else [o for o in options if o not in valid]


def _options(parser):
    options = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            options |= {name for p in action.choices.values() for name in _options(p)}
    return options


def _tf_dgc(arguments):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            options = main._parser().parse_args(arguments)
        except SystemExit:
            return errors.getvalue()
    if options.command == "run" and options.module and options.script == "tf_dgc":
        return _tf_dgc(options.args)
    return None


def _pip(arguments):
    groups = [e for a in arguments for e in re.findall(r"\[([\w,]+)\]", a)]
    text = (pages.ROOT / "pyproject.toml").read_text()
    extras = re.findall(
        r"^(\w+) = \[$", text.partition("optional-dependencies]")[2], re.M
    )
    missing = {e for group in groups for e in group.split(",")} - {*extras}
    return f"no extra {sorted(missing)}" if missing else None


def _make(arguments):
    result = subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=pages.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stderr if result.returncode else None


def _missing(word):
    """Return a fault if a path does not exist; names without a folder may not exist."""
    is_path = re.fullmatch(r"(?:\w[\w.]*/)+[\w.]*", word)
    if not is_path or pathlib.Path(pages.ROOT / word).exists() or ".venv" in word:
        return None
    return f"{word} is not there"
