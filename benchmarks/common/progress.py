"""Progress of a benchmark: bars on a terminal, and elsewhere a line per item.

    for name in progress.track(names, "methods", str):
        measure(name)

Output goes to standard error; the bar of a nested loop is below that of the outer loop.
Bars are drawn only between items, since a thread that draws would disturb measurements.
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

_REDRAW = 0.2  # seconds between drawings, for items without names


def track(items, plural, name=None):
    """Yield the items, and show how many are done.

    Args:
        items: items of a loop.
        plural: noun for the items, in the plural.
        name: function that returns an item's name; None for items that are only
            counted, and not shown without a terminal.
    """
    items = list(items)
    if _bars.begin():
        yield from _bars.track(items, plural, name)
        return
    for number, item in enumerate(items, 1):
        if name:
            line = f"{plural}: {name(item)} ({number} of {len(items)})"
            print(line, file=sys.stderr, flush=True)
        yield item


def stop():
    """Remove the bars of loops that an error has ended."""
    _bars.stop()


class _RemainingTime(ProgressColumn):
    """Estimates the remaining time from the mean of finished items."""

    def render(self, task):
        seconds = task.fields["seconds"]
        # Rows of an earlier run take no time and do not count.
        measured = [s for s in seconds if s > max(seconds) / 100]
        if not measured:
            return Text("")
        remaining = round((task.total - len(seconds)) * statistics.mean(measured))
        return Text(f"{datetime.timedelta(seconds=remaining)} left")


class _Item(ProgressColumn):
    """The item's name, truncated to the width of the terminal."""

    def render(self, task):
        return Text(task.fields["item"], no_wrap=True, overflow="ellipsis")


def _columns():
    fixed = Column(no_wrap=True)
    return (
        TextColumn("{task.description}", markup=False, table_column=fixed),
        BarColumn(bar_width=20, table_column=fixed),
        MofNCompleteColumn(table_column=fixed),
        _RemainingTime(table_column=fixed),
        _Item(),
    )


class _Bars:
    """One bar per running loop, the outermost first."""

    def __init__(self):
        self._progress = None
        self._drawn = 0.0

    def begin(self):
        """Start showing bars if there is a terminal; return whether there is one."""
        if self._progress is None:
            console = Console(stderr=True)
            if not console.is_interactive:
                return False
            self._progress = Progress(
                *_columns(),
                console=console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,  # else it would go to standard error
            )
            self._progress.start()
            console.show_cursor()  # for the terminal of a killed process
        return True

    def track(self, items, plural, name):
        """Yield the items, and show a bar for them."""
        progress, seconds = self._progress, []
        outermost = not progress.tasks
        bar = progress.add_task(plural, total=len(items), item="", seconds=seconds)
        try:
            for item in items:
                progress.update(
                    bar, completed=len(seconds), item=name(item) if name else ""
                )
                self._draw(progress, always=name is not None)
                start = time.monotonic()
                yield item
                seconds.append(time.monotonic() - start)
        finally:
            progress.remove_task(bar)
            if outermost and progress is self._progress:
                self.stop()

    def stop(self):
        """Remove all bars."""
        if self._progress:
            self._progress.stop()
            self._progress = None

    def _draw(self, progress, always):
        if always or time.monotonic() - self._drawn > _REDRAW:
            progress.refresh()
            self._drawn = time.monotonic()


_bars = _Bars()
# Removes the bars after the traceback of an error.
atexit.register(_bars.stop)
