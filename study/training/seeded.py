"""Runs of a benchmark that differ by their seed alone."""

import functools

import keras


def rows(done, key, seeds, make_trainer, measure):
    """Return the rows of all seeds; runs that are not there are done.

    Args:
        done: a `ResumableRows`.
        key: dictionary with its keys, but for the seed, which is the last one.
        seeds: of the runs.
        make_trainer: returns what trains; called once for all seeds, as tracing takes
            long, and not at all if nothing is to be done.
        measure: called with a function that returns the trainer, a seed and a
            `RunCheckpoint`; returns the rest of the row.
    """

    @functools.cache
    def trainer():
        keras.backend.clear_session()
        return make_trainer()

    def row(seed):
        measured = functools.partial(measure, trainer, seed)
        return done.row({**key, "seed": seed}, measured)

    return [row(seed) for seed in seeds]
