"""Ends a run of the fault matrix with a table of what every worker saw."""

import pytest


@pytest.fixture
def record(request):
    """Return a function that adds a line to the table.

    A line has the fault, and per surviving worker its rank, what it said, and the
    seconds from the fault to that and to its end.
    """

    def add(fault, rows):
        request.node.user_properties.append(("fault", (fault, rows)))

    return add


def pytest_terminal_summary(terminalreporter):
    reports = [r for rs in terminalreporter.stats.values() for r in rs]
    found = [
        value
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "fault"
    ]
    if not found:
        return
    terminalreporter.section("faults")
    write = terminalreporter.write_line
    write("| fault | worker: what it saw | error after (s) | gone after (s) |")
    write("|---|---|---|---|")
    for fault, rows in found:
        for i, (rank, saw, error, gone) in enumerate(rows):
            times = " | ".join("" if t is None else f"{t:.1f}" for t in (error, gone))
            write(f"| {'' if i else fault} | {rank}: {saw} | {times} |")
