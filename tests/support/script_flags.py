"""Parses what is passed to scripts, without running them; a process of its own.

    python tests/support/script_flags.py < commands.json > faults.json

The input is a list of [script, arguments, whether values count], the output a list of
what is wrong with each, null where nothing is. A script has flags of absl, or else a
function `_parser`.
"""

import contextlib
import io
import json
import pathlib
import runpy
import sys

from absl import flags


def main():
    asked = json.load(sys.stdin)
    scripts = list(dict.fromkeys(script for script, *_ in asked))
    with contextlib.redirect_stdout(sys.stderr):
        found = {s: _faults([a for a in asked if a[0] == s]) for s in scripts}
    json.dump([found[script].pop(0) for script, *_ in asked], sys.stdout)


def _faults(asked):
    """Return what is wrong with each command of one script."""
    script = asked[0][0]
    names = set(flags.FLAGS)
    sys.path.insert(0, str(pathlib.Path(script).resolve().parent))
    module = runpy.run_path(script)
    faults = [_fault(module, *command) for command in asked]
    sys.path.pop(0)
    own = set(flags.FLAGS) - names
    for module_name, defined in flags.FLAGS.flags_by_module_dict().items():
        if own & {flag.name for flag in defined}:
            sys.modules.pop(module_name, None)  # or it would not define them again
    for name in own:
        delattr(flags.FLAGS, name)
    return faults


def _fault(module, script, arguments, whole):
    if not whole:
        return _unknown(module, arguments)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            if "_parser" in module:
                module["_parser"]().parse_args(arguments)
            elif rest := flags.FLAGS([script, *arguments])[1:]:
                return f"{script} takes no {rest}"
            else:
                flags.FLAGS.unparse_flags()
    except (flags.Error, SystemExit) as error:
        return f"{error} {said.getvalue()}"
    return None


def _unknown(module, arguments):
    """Return flags that are not defined; values may be placeholders."""
    if "_parser" in module:
        return None
    names = [a[2:].split("=")[0] for a in arguments if a.startswith("--")]
    unknown = [n for n in names if n not in flags.FLAGS and n[2:] not in flags.FLAGS]
    return f"no flags {unknown}" if unknown else None


main()
