"""How far a benchmark is: bars on a terminal, and elsewhere a line for each item.

    for name in progress.track(names, "methods", str):
        measure(name)

All of it goes to standard error, and a loop within a loop has a bar below the other's.
Bars are drawn between items alone: a thread that drew them would take time from what is
measured.
"""

import atexit
import datetime
import statistics
import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
)
from rich.table import Column
from rich.text import Text

_REDRAW = 0.2  # seconds, of items without names


def track(items, what, name=None):
    """Yield the items, and show how many of them are done.

    Args:
        items: of a loop; they are counted before it begins.
        what: noun for them, in the plural.
        name: function that returns what an item is called; None for items that are only
            counted, of which nothing is said where there is no terminal.
    """
    items = list(items)
    if _bars.begin():
        yield from _bars.track(items, what, name)
        return
    for number, item in enumerate(items, 1):
        if name:
            line = f"{what}: {name(item)} ({number} of {len(items)})"
            print(line, file=sys.stderr, flush=True)
        yield item


def stop():
    """Take away the bars of loops that an error has ended."""
    _bars.stop()


class _Left(ProgressColumn):
    """The time that is left, if items to come take what others took in the mean."""

    def render(self, task):
        spent = task.fields["spent"]
        # What an earlier run has done takes no time, and says nothing of the others.
        told = [s for s in spent if s > max(spent) / 100]
        if not told:
            return Text("")
        left = round((task.total - len(spent)) * statistics.mean(told))
        return Text(f"{datetime.timedelta(seconds=left)} left")


class _Item(ProgressColumn):
    """What the item is called, as far as there is room."""

    def render(self, task):
        return Text(task.fields["item"], no_wrap=True, overflow="ellipsis")


def _columns():
    whole = Column(no_wrap=True)
    return (
        TextColumn("{task.description}", markup=False, table_column=whole),
        BarColumn(bar_width=20, table_column=whole),
        MofNCompleteColumn(table_column=whole),
        _Left(table_column=whole),
        _Item(),
    )


class _Bars:
    """One bar for each loop that is under way, the outermost first."""

    def __init__(self):
        self._progress = None
        self._drawn = 0.0

    def begin(self):
        """Return whether there is a terminal, on which bars are shown from now on."""
        if self._progress is None:
            console = Console(stderr=True)
            if not console.is_interactive:
                return False
            self._progress = Progress(
                *_columns(),
                console=console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,  # it would go to standard error
            )
            self._progress.start()
            console.show_cursor()  # or what is killed leaves a terminal without one
        return True

    def track(self, items, what, name):
        """Yield the items, with a bar for them."""
        progress, spent = self._progress, []
        outermost = not progress.tasks
        bar = progress.add_task(what, total=len(items), item="", spent=spent)
        try:
            for item in items:
                progress.update(
                    bar, completed=len(spent), item=name(item) if name else ""
                )
                self._draw(progress, always=name is not None)
                start = time.monotonic()
                yield item
                spent.append(time.monotonic() - start)
        finally:
            progress.remove_task(bar)
            if outermost and progress is self._progress:
                self.stop()

    def stop(self):
        """Take all bars away."""
        if self._progress:
            self._progress.stop()
            self._progress = None

    def _draw(self, progress, always):
        if always or time.monotonic() - self._drawn > _REDRAW:
            progress.refresh()
            self._drawn = time.monotonic()


_bars = _Bars()
# Errors that end a benchmark are shown above the bars, which go last.
atexit.register(_bars.stop)
