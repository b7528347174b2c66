"""Accuracy against time, over real links: what `time_to_accuracy.py` measured."""

from study import pictures, target_times
from study.plan_page import markdown as table

_TEXT = """\
Here workers are processes, and links are real: network namespaces, whose rate is
limited (`benchmarks/time_to_accuracy.py`). Seconds until the test set's accuracy is
half a point less than the dense run's at its end: means over seeds, of methods that
came to it in all runs. `dgc` is `dgc_for_steps`, `dense` stock Keras."""


def section(rows, out):
    """Return the table and the picture as Markdown, or nothing without a row.

    Args:
        rows: rows of `time_to_accuracy.py`.
        out: folder of the picture.
    """
    if not rows:
        return ""
    shown = target_times.compared(rows, target_times.TOLERANCE)
    name = "over-links.svg"
    pictures.draw_over_time(shown, out / name)
    lines = [_line(row) for row in target_times.summaries(shown)]
    headings = ["task", "rate", "method", "seeds", "accuracy %", "to dense, points"]
    headings += ["s to target", "dense's time by its", "processor"]
    picture = f"![accuracy against time]({name})"
    title = "## Time to an accuracy, over real links"
    return "\n\n".join([title, _TEXT, table(headings, lines), picture])


def _line(row):
    never = f"{row['reached']} of {row['runs']} came to it"
    return [
        *(row[name] for name in ("task", "rate", "mode", "runs")),
        f"{100 * row['value']:.2f}" if "value" in row else f"{row['failures']} failed",
        _difference(row),
        f"{row['target_seconds']:,.1f}" if "target_seconds" in row else never,
        _times(row),
        row["processor"],
    ]


def _difference(row):
    if "to_dense" not in row:
        return ""
    half = row["half_width"]  # None of one seed
    interval = "" if half is None else f" ± {100 * half:.2f}"
    return f"{100 * row['to_dense']:+.2f}{interval}"


def _times(row):
    if "times" not in row:
        return ""
    ends = [row[name] for name in ("times_least", "times_most") if name in row]
    within = " ({:.2f} to {:.2f})".format(*ends) if ends else ""
    return f"{row['times']:.2f}{within}"
