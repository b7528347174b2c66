"""Extrapolates collectives to more workers with the cost model, and draws the result.

The speeds of links and processors are measured by a few workers, or given by flags.
"""

import matplotlib as mpl

mpl.use("agg")

import tensorflow as tf
from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter, ScalarFormatter

from common.algorithms import create_algorithm
from tf_dgc.codecs import buffer
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives import RequestSize, predict_seconds
from tf_dgc.compressors import num_sent

WORKERS = [2**i for i in range(1, 11)]
_TABLE_WORKERS = [2, 4, 8, 16, 64, 256, 1024]
COLUMNS = [("exchange", "exchange", "")] + [
    (str(number), f"{number} (ms)", ",.4g") for number in _TABLE_WORKERS
]
_FLOAT16 = "float16, "


def extrapolate(names, size, sparsity, links):
    """Return a row per algorithm, and one for a dense sum as float16.

    A row has milliseconds by number of workers.

    Args:
        names: names of algorithms; see `create_algorithm`.
        size: entries of the model's only tensor.
        sparsity: share of entries not sent.
        links: a `LinkSpeeds`.
    """
    layout = [TensorSpec("", (size,), tf.float32, False)]
    num_bytes = 4 * buffer.sparse_words(layout, [num_sent(size, sparsity)])
    requests = {name: RequestSize("entries", num_bytes) for name in names}
    requests[f"{_FLOAT16}ring"] = RequestSize("sum", 2 * size)
    return [
        {"exchange": name} | {str(n): _predict_ms(name, r, n, links) for n in WORKERS}
        for name, r in requests.items()
    ]


def _predict_ms(name, request, num_workers, links):
    algorithm = create_algorithm(name.removeprefix(_FLOAT16), num_workers)
    rounding = request.num_bytes * links.rounding if _FLOAT16 in name else 0.0
    seconds = predict_seconds(algorithm, [request], num_workers, links)
    return 1000 * (seconds + rounding)


def draw(rows, path, title):
    """Draw a line per algorithm.

    Args:
        rows: rows of `extrapolate`.
        path: file of the picture; its extension determines the format.
        title: title of the picture.
    """
    figure, axis = plt.subplots(figsize=(8, 5))
    for row in rows:
        dense = row["exchange"].startswith(_FLOAT16)
        axis.plot(
            WORKERS,
            [row[str(number)] / 1000 for number in WORKERS],
            label=row["exchange"],
            color="black" if dense else None,
            linestyle="--" if dense else "-",
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(WORKERS)
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.yaxis.set_major_formatter(EngFormatter(unit="s"))
    axis.set_xlabel("workers")
    axis.set_ylabel("exchange and decoding")
    axis.set_title(title, fontsize=10)
    axis.grid(visible=True, color="0.93", zorder=0)
    axis.legend(fontsize=8)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
