"""Compares predictions of `tf-dgc advise` with measured steps.

    python benchmarks/advice.py --predict --predicted new.json
    sudo python benchmarks/advice.py --measure --predicted new.json --json rows.jsonl
    python benchmarks/advice.py --predicted new.json --from_json rows.jsonl

`--predict` times steps of processes that run side by side without communicating, and
writes the predicted times of steps on links of each rate and round trip. Predictions
come first, are committed, and are never overwritten; without `--predicted` the other
modes read the predictions of the documentation.

`--measure` takes the same steps on workers in network namespaces whose links have that
rate and, with a round trip, that delay (`common/distance.py`). Each row is appended to
`--json` at once and is not measured again. Every method uses the collective algorithm
that the advice names: the ring, or "auto", which may overlap steps where this pays.
Column `went_by` has the algorithm that was used.
"""

import json
import pathlib
import sys

from absl import app, flags
from common import advice_rows, models, network, progress, reporting, resumable, signals
from common.cluster import WorkerError

COLUMNS = [
    ("model", "model", ""),
    ("workers", "workers", "d"),
    ("link", "link", ""),
    ("method", "method", ""),
    ("exchange", "exchange", ""),
    ("went_by", "went by", ""),
    ("predicted_ms", "predicted (ms)", ",.1f"),
    ("measured_ms", "measured (ms)", ",.1f"),
    ("error", "error", "+.0%"),
    ("of_best", "of the best", ".2f"),
    ("advised", "advised", ""),
]
RESULTS = pathlib.Path(__file__).parent / "results"
PREDICTED = RESULTS / "advice_predicted.json"

_PREDICT = flags.DEFINE_boolean("predict", False, "Predict, and write the file.")
_MEASURE = flags.DEFINE_boolean("measure", False, "Measure the predicted steps.")
_PREDICTED = flags.DEFINE_string("predicted", str(PREDICTED), "File of predictions.")
_MODELS = flags.DEFINE_list("models", ["cnn", "images", "medium"], "Models to train.")
_WORKERS = flags.DEFINE_list("workers", ["2", "4"], "Numbers of workers.")
_LINKS = flags.DEFINE_list(
    "links",
    ["10gbit", "1gbit", "100mbit", "100mbit+20ms"],
    "Rates as `tc` has them, and round trips in ms.",
)
_METHODS = flags.DEFINE_list("methods", None, "Methods of `tf-dgc advise`.")
_THREADS = flags.DEFINE_integer("threads", 1, "Intra-op threads of a worker.")
_SECONDS = flags.DEFINE_float(
    "seconds", 10.0, "Seconds to predict all methods, or to measure one on a link.", 0.1
)
_TIMEOUT = flags.DEFINE_float("timeout", 900.0, "Seconds that a worker has to answer.")
_JSON = flags.DEFINE_string("json", None, "A file for the rows that are measured.")
_MARKDOWN = flags.DEFINE_string("markdown", None, "A file for a table, .md.")
_FROM_JSON = flags.DEFINE_string("from_json", None, "Such a file to report.")


def main(_):
    """Predict, measure, or report."""
    if _PREDICT.value + _MEASURE.value + bool(_FROM_JSON.value) != 1:
        raise app.UsageError("Give one of --predict, --measure and --from_json.")
    if _PREDICT.value and pathlib.Path(_PREDICTED.value).exists():
        raise app.UsageError(
            f"{_PREDICTED.value} exists, and measured rows are compared with it: "
            "name a new file by --predicted."
        )
    signals.raise_on_signals()
    try:
        if _PREDICT.value:
            rows = _predict()
            columns = [column for column in COLUMNS if column[0] in rows[0]]
            reporting.report(rows, columns, "Predicted", _PREDICTED.value)
            return
        rows = _measure() if _MEASURE.value else resumable.read_rows([_FROM_JSON.value])
    except (PermissionError, network.NetworkError, WorkerError) as error:
        sys.exit(f"advice.py: {error}")
    except KeyboardInterrupt:
        sys.exit("advice.py: interrupted")
    predicted = _predictions()
    compared = advice_rows.compare(predicted, rows)
    if not compared:
        sys.exit(f"advice.py: no row was predicted in {_PREDICTED.value}")
    reporting.report(compared, COLUMNS, "Predicted and measured", origin=rows[0])
    print(advice_rows.summarize(compared))
    print(advice_rows.describe_sources(_PREDICTED.value, predicted, rows))
    if _MARKDOWN.value:
        methods = dict.fromkeys(row["method"] for row in compared)
        columns = [*COLUMNS[:3], *((m, m, "") for m in methods)]
        table = reporting.markdown(advice_rows.group_by_setting(compared), columns)
        pathlib.Path(_MARKDOWN.value).write_text(table, encoding="utf-8")


def _predict():
    rows = []
    for model, num_workers in progress.track(_clusters(), "clusters", _label):
        rows += advice_rows.predict(
            _settings("none", model, num_workers),
            num_workers,
            _METHODS.value,
            _SECONDS.value,
            _TIMEOUT.value,
            _LINKS.value,
        )
    return rows


def _measure():
    resumable_rows = resumable.ResumableRows(
        _JSON.value, advice_rows.KEYS, reporting.provenance()
    )
    predicted, rows = _predictions(), []
    for model, num_workers in progress.track(_clusters(), "clusters", _label):
        selected = [
            row
            for row in predicted
            if (row["model"], row["workers"]) == (model, num_workers)
            and row["link"] in _LINKS.value
            and (_METHODS.value is None or row["method"] in _METHODS.value)
        ]
        rows += advice_rows.measure(
            _settings("advice", model, num_workers),
            num_workers,
            selected,
            resumable_rows,
            _SECONDS.value,
            _TIMEOUT.value,
        )
    return rows


def _settings(mode, model, num_workers):
    return {
        "mode": mode,
        "model": model,
        "threads": _THREADS.value,
        "num_workers": num_workers,
    }


def _clusters():
    """Return (model, number of workers) of every cluster."""
    unknown = [name for name in _MODELS.value if name not in models.MODELS]
    if unknown:
        raise app.UsageError(f"Models are {', '.join(models.MODELS)}: not {unknown}")
    return [(m, int(n)) for m in _MODELS.value for n in _WORKERS.value]


def _label(cluster):
    model, num_workers = cluster
    return f"{model}, {num_workers} workers"


def _predictions():
    return json.loads(pathlib.Path(_PREDICTED.value).read_text(encoding="utf-8"))


if __name__ == "__main__":
    app.run(main)
