"""What exchanges would take on more workers, by the cost model; and its picture.

Not measured: links and processors are those that few workers found, or that were given.
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
_SHOWN = [2, 4, 8, 16, 64, 256, 1024]
COLUMNS = [("exchange", "exchange", "")] + [
    (str(number), f"{number} (ms)", ",.4g") for number in _SHOWN
]
_FLOAT16 = "float16, "


def extrapolate(names, size, sparsity, links):
    """Return a row per exchange: milliseconds by number of workers.

    Args:
        names: of exchanges, as `create_algorithm` takes them.
        size: entries of the model, of one tensor; uncompressed, summed as float16.
        sparsity: share of them that is not sent.
        links: a `Links`.
    """
    layout = [TensorSpec("", (size,), tf.float32, False)]
    num_bytes = 4 * buffer.sparse_words(layout, [num_sent(size, sparsity)])
    asked = {name: [RequestSize("entries", num_bytes)] for name in names}
    asked[f"{_FLOAT16}ring"] = [RequestSize("sum", 2 * size)]
    return [
        {"exchange": name} | {str(n): _ms(name, what, n, links) for n in WORKERS}
        for name, what in asked.items()
    ]


def _ms(name, asked, number, links):
    exchange = create_algorithm(name.removeprefix(_FLOAT16), number)
    rounding = asked[0].num_bytes * links.rounding if _FLOAT16 in name else 0.0
    return 1000 * (predict_seconds(exchange, asked, number, links) + rounding)


def draw(rows, path, title):
    """Draw a line per exchange.

    Args:
        rows: of `extrapolate`.
        path: of the picture; its ending decides on the format.
        title: of it.
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
