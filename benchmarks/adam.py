"""Does AdamW train behind compression? A small GPT-2 on the characters of Shakespeare.

    python benchmarks/adam.py --data_dir ~/tensorflow_datasets --json runs.json

Trains a transformer of two layers, 413,312 parameters, on workers of this process with
stock AdamW, and by DGC and other methods with Adam correction and without. What is
reported is the loss of the validation text, in nats per character; `--runs` chooses.
"""

import os
import statistics

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from absl import app, flags
from common import reporting, tasks, training

import tf_dgc

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TensorFlow Datasets keeps it.")
_RUNS = flags.DEFINE_list("runs", [], "Names of runs; empty for all.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "Runs of each.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 1500, "Steps of a run.", lower_bound=5)
_WORKERS = flags.DEFINE_integer("workers", 2, "Workers.", lower_bound=2)
_BATCH = flags.DEFINE_integer("batch", 16, "Examples of a worker.", lower_bound=1)
_RATE = flags.DEFINE_float("rate", 2e-3, "Learning rate, of a cosine decay.")
_JSON = flags.DEFINE_string("json", None, "A file for all runs.")

WIDTH, HEADS, LAYERS = 128, 4, 2
COLUMNS = [
    ("method", "method", ""),
    ("value", "loss", ".4f"),
    ("spread", "+-", ".4f"),
    ("difference", "to dense", "+.1%"),
    ("ratio", "total ratio", ",.1f"),
]


class Characters(tasks.Shakespeare):
    """Characters of Shakespeare, by a transformer as GPT-2 is one; see `Task`."""

    length = 64

    @staticmethod
    def load(data_dir):
        """Return training and validation text, as numbers below 65."""
        return [tasks.shakespeare(data_dir, s) for s in ("train", "validation")]

    @classmethod
    def model(cls):
        """Return the network, with weights drawn anew."""
        inputs = keras.Input((cls.length,), dtype="int32")
        embed = keras.layers.ReversibleEmbedding(
            cls._CHARACTERS, WIDTH, embeddings_initializer=_normal()
        )
        places = keras.layers.Embedding(cls.length, WIDTH, _normal())
        counted = keras.ops.cumsum(keras.ops.ones_like(inputs), axis=-1)
        hidden = embed(inputs) + places(counted - 1)
        for _ in range(LAYERS):
            hidden = _layer(hidden)
        return keras.Model(inputs, embed(_normalized(hidden), reverse=True))


def _layer(hidden):
    attend = keras.layers.MultiHeadAttention(
        HEADS, WIDTH // HEADS, kernel_initializer=_normal()
    )
    seen = _normalized(hidden)
    hidden = hidden + attend(seen, seen, use_causal_mask=True)
    seen = _normalized(hidden)
    for width, activation in ((4 * WIDTH, "gelu"), (WIDTH, None)):
        dense = keras.layers.Dense(width, activation, kernel_initializer=_normal())
        seen = dense(seen)
    return hidden + seen


def _normalized(hidden):
    return keras.layers.LayerNormalization(epsilon=1e-5)(hidden)


def _normal():
    return keras.initializers.TruncatedNormal(stddev=0.02)


def _dgc(sparsity, **settings):
    def make(inner, steps):
        density = 1 - sparsity
        stages = [1 - 0.25 * (density / 0.25) ** (i / 4) for i in range(4)]
        schedule = tf_dgc.schedules.WarmupSparsity(steps // 5, sparsity, stages)
        return tf_dgc.DGCOptimizer(inner, schedule, **settings)

    return make


def _by(method, **settings):
    return lambda inner, _: tf_dgc.CompressedOptimizer(inner, method, **settings)


RUNS = {
    "dense": lambda inner, _: inner,
    "dgc 99 %": _dgc(0.99),
    "dgc 99 % masking": _dgc(0.99, factor_masking=True),
    "dgc 99 % uncorrected": _dgc(0.99, adam_correction=False),
    "dgc 99.9 %": _dgc(0.999),
    "dgc 99.9 % uncorrected": _dgc(0.999, adam_correction=False),
    **{
        f"{method}{suffix}": _by(method, **settings)
        for method in ("ef_sign_sgd", "power_sgd", "uniform_8bit")
        for suffix, settings in (
            ("", {}),
            (" uncorrected", {"adam_correction": False}),
        )
    },
}


def train(task, strategy, name):
    """Return the loss by seed, and how many times less than all one worker sent."""
    steps = _STEPS.value

    def make_optimizer():
        decay = keras.optimizers.schedules.CosineDecay(_RATE.value, steps)
        return RUNS[name](keras.optimizers.AdamW(decay), steps)

    trainer = training.Trainer(task, make_optimizer, strategy)
    ends = [trainer.run(seed, steps, steps)[-1] for seed in range(_SEEDS.value)]
    sent = ends[0][1] or 4 * trainer.num_parameters * steps
    return [end[2] for end in ends], 4 * trainer.num_parameters * steps / sent


def main(_):
    """Run what the flags ask for, and report."""
    strategy = training.make_strategy(_WORKERS.value)  # before data are read
    task = Characters(_DATA_DIR.value)
    task.batch_size = _BATCH.value
    rows = []
    for name in dict.fromkeys(["dense", *(_RUNS.value or RUNS)]):
        losses, ratio = train(task, strategy, name)
        value = statistics.mean(losses)
        rows.append(
            {
                "method": name,
                "losses": losses,
                "value": value,
                "spread": (max(losses) - min(losses)) / 2,
                "difference": value / (rows[0]["value"] if rows else value) - 1,
                "ratio": ratio,
            }
        )
    title = f"loss after {_STEPS.value} steps, {_WORKERS.value} workers"
    origin = reporting.provenance()
    reporting.report(rows, COLUMNS, title, origin=origin)
    if _JSON.value:
        reporting.write(rows, _JSON.value, origin)


if __name__ == "__main__":
    app.run(main)
