"""Signals that end a benchmark: workers and networks have to be ended with it."""

import signal


def end_orderly():
    """Let the first signal raise `KeyboardInterrupt`, and nothing disturb what ends."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(*_):
        for s in signals:
            signal.signal(s, signal.SIG_IGN)
        raise KeyboardInterrupt

    for s in signals:
        signal.signal(s, interrupt)
