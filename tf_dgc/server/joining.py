"""Joining: how a worker comes to take part with all servers, and with what weights."""

from collections.abc import Sequence

import tensorflow as tf

from tf_dgc.server.links import Link
from tf_dgc.server.messages import gist


def join(links: Sequence[Link]) -> None:
    """Take part with all servers, and set the variables to their weights.

    The first server says which worker gives first weights, to all of them and to it
    last: so that all are of one worker, and who is let in there finds them everywhere.

    Args:
        links: links to all servers, connected.

    Raises:
        RuntimeError: if one refuses this worker, or does not respond, or if not all go
            on from a checkpoint.
    """
    try:
        _join(*links)
    except (RuntimeError, tf.errors.OpError) as error:
        for link in links:
            link.leave()
        text = getattr(error, "message", error)
        raise RuntimeError(gist(str(text))) from error


def _join(first: Link, *others: Link) -> None:
    while True:
        gives, _ = first.enter()
        if gives:
            for link in others:
                _give(link, first)
            first.give()
        if first.start():
            break
    for link in others:
        if not gives:
            asks, _ = link.enter()
            if asks:
                raise RuntimeError(_without_checkpoint(link, first))
        link.start()


def _give(link: Link, first: Link) -> None:
    asks, clock = link.enter()
    if asks:
        link.give()
    elif clock:  # if it is 0, who gave them is gone
        raise RuntimeError(_without_checkpoint(first, link))


def _without_checkpoint(anew: Link, goes_on: Link) -> str:
    return (
        f"tf_dgc: {anew.name} begins anew, where {goes_on.name} goes "
        "on from a checkpoint: put back the file that is missing in TF_DGC_SERVER_DIR, "
        "or remove those of all servers."
    )
