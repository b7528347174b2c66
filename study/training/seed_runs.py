"""Runs that differ in their seed only."""

import functools

import keras


def run_seeds(store, key, seeds, make_trainer, measure):
    """Return the rows of all seeds, and do the runs that are missing.

    Args:
        store: a `ResumableRows`.
        key: dictionary with its keys except the seed, which is the last one.
        seeds: seeds of the runs.
        make_trainer: returns the trainer. It is called once for all seeds, since
            tracing is slow, and not at all if no run is missing.
        measure: called with a function that returns the trainer, a seed and a
            `RunCheckpoint`; returns the rest of the row.
    """

    @functools.cache
    def trainer():
        keras.backend.clear_session()
        return make_trainer()

    rows = []
    for seed in seeds:
        measure_seed = functools.partial(measure, trainer, seed)
        rows.append(store.row({**key, "seed": seed}, measure_seed))
    return rows
