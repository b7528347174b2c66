"""Makes blocks of code of the interactive examples in docstrings."""

import re

import griffe

_EXAMPLE = re.compile(r"^ *>>> .*\n?(?: *(?:>>>|\.\.\.).*\n?)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Puts fences around lines that begin with `>>>`, which are quotes in Markdown."""

    def on_instance(self, *, obj, **kwargs):
        """Change a docstring before it is parsed."""
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(match):
    return f"```pycon\n{match[0].rstrip()}\n```\n"
