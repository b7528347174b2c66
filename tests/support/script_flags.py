"""Parses arguments of scripts without running them; runs as a separate process.

    python tests/support/script_flags.py < commands.json > faults.json

The input is a list of [script, arguments, whether to check values], the output a list
of faults, null for a correct command. A script has absl flags or a function `_parser`.
"""

import contextlib
import io
import json
import pathlib
import runpy
import sys

from absl import flags


def main():
    commands = json.load(sys.stdin)
    scripts = list(dict.fromkeys(script for script, *_ in commands))
    with contextlib.redirect_stdout(sys.stderr):
        faults = {s: _faults([c for c in commands if c[0] == s]) for s in scripts}
    json.dump([faults[script].pop(0) for script, *_ in commands], sys.stdout)


def _faults(commands):
    """Return the fault of each command of one script, None for a correct one."""
    script = commands[0][0]
    names = set(flags.FLAGS)
    sys.path.insert(0, str(pathlib.Path(script).resolve().parent))
    module = runpy.run_path(script)
    faults = [_fault(module, *command) for command in commands]
    sys.path.pop(0)
    script_flags = set(flags.FLAGS) - names
    for module_name, module_flags in flags.FLAGS.flags_by_module_dict().items():
        if script_flags & {flag.name for flag in module_flags}:
            sys.modules.pop(module_name, None)  # or it would not define them again
    for name in script_flags:
        delattr(flags.FLAGS, name)
    return faults


def _fault(module, script, arguments, check_values):
    if not check_values:
        return _unknown(module, arguments)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            if "_parser" in module:
                module["_parser"]().parse_args(arguments)
            elif rest := flags.FLAGS([script, *arguments])[1:]:
                return f"{script} takes no {rest}"
            else:
                flags.FLAGS.unparse_flags()
    except (flags.Error, SystemExit) as error:
        return f"{error} {errors.getvalue()}"
    return None


def _unknown(module, arguments):
    """Return a fault if flags are not defined; values may be placeholders."""
    if "_parser" in module:
        return None
    names = [a[2:].split("=")[0] for a in arguments if a.startswith("--")]
    unknown = [n for n in names if n not in flags.FLAGS and n[2:] not in flags.FLAGS]
    return f"no flags {unknown}" if unknown else None


main()
