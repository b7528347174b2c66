"""Handles signals that end a benchmark, so that it ends its workers and networks."""

import signal


def raise_on_signals():
    """Raise `KeyboardInterrupt` at the first signal, and ignore further signals."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(*_):
        for s in signals:
            signal.signal(s, signal.SIG_IGN)
        raise KeyboardInterrupt

    for s in signals:
        signal.signal(s, interrupt)
