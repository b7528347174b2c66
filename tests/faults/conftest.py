"""Prints a table of the workers' errors at the end of a run of the fault matrix."""

import pytest


@pytest.fixture
def record(request):
    """Return a function that adds a fault to the table.

    It takes the fault and, for each surviving worker, its rank, its message, and the
    seconds from the fault to the message and to the worker's end.
    """

    def add(fault, rows):
        request.node.user_properties.append(("fault", (fault, rows)))

    return add


def pytest_terminal_summary(terminalreporter):
    reports = [r for rs in terminalreporter.stats.values() for r in rs]
    faults = [
        value
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "fault"
    ]
    if not faults:
        return
    terminalreporter.section("faults")
    write = terminalreporter.write_line
    write("| fault | worker: what it saw | error after (s) | gone after (s) |")
    write("|---|---|---|---|")
    for fault, rows in faults:
        for i, (rank, saw, error, gone) in enumerate(rows):
            times = " | ".join("" if t is None else f"{t:.1f}" for t in (error, gone))
            write(f"| {'' if i else fault} | {rank}: {saw} | {times} |")
