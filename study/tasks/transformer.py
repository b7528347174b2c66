"""The tasks of `adam.py`: a small GPT-2 on two texts, and fine-tuning on digits."""

import pathlib

import keras
import numpy as np
from absl import app

from tasks import penn, small

WIDTH, HEADS, LAYERS = 128, 4, 2
_EVALUATION_BATCH = 32
_PRETRAINING_BATCH, _PRETRAINING_RATE = 64, 1e-3  # of Adam, for one epoch


class Language(small.Task):
    """Predicts the next token with KerasHub's GPT-2, two layers without dropout.

    Its weights are random at first. A worker's step has `batch_size` sequences from
    random positions of the text. The metric is the mean cross-entropy per token of the
    validation text, in consecutive sequences.
    """

    metric = "loss"
    higher_is_better = False
    batch_size = 16
    jit_compile = True  # takes three quarters of the time
    length = 64  # tokens of an example
    vocabulary: int

    @classmethod
    def model(cls):
        """Return the network with random weights."""
        backbone = _keras_hub().models.GPT2Backbone(
            vocabulary_size=cls.vocabulary,
            num_layers=LAYERS,
            num_heads=HEADS,
            hidden_dim=WIDTH,
            intermediate_dim=4 * WIDTH,
            dropout=0.0,
            max_sequence_length=cls.length,
        )
        tokens = keras.Input((cls.length,), dtype="int32")
        inputs = {"token_ids": tokens, "padding_mask": keras.ops.ones_like(tokens)}
        logits = backbone.token_embedding(backbone(inputs), reverse=True)
        return keras.Model(tokens, logits)

    def batch(self, random):
        """Return sequences of the text, and the sequences one token later."""
        starts = random.integers(0, len(self.train) - self.length, self.batch_size)
        return self._sequences(self.train, starts)

    def evaluate(self, predict):
        """Return the mean cross-entropy per token, in nats."""
        starts = np.arange(0, len(self.test) - self.length, self.length)
        total = 0.0
        for first in range(0, len(starts), _EVALUATION_BATCH):
            batch_starts = starts[first : first + _EVALUATION_BATCH]
            inputs, targets = self._sequences(self.test, batch_starts)
            total += float(self._loss(targets, predict(inputs))) * len(batch_starts)
        return total / len(starts)

    def _sequences(self, text, starts):
        indices = starts[:, np.newaxis] + np.arange(self.length)
        return text[indices], text[indices + 1]


class Characters(Language):
    """Characters of Shakespeare; 413,312 parameters."""

    name = "shakespeare"
    vocabulary = 65

    @staticmethod
    def load(folders):
        """Return training and validation text, as numbers below 65."""
        splits = "train", "validation"
        return [small.shakespeare(folders.data_dir, split) for split in splits]


class Words(Language):
    """Words of the Penn Treebank; 1,684,992 parameters."""

    name = "ptb"
    vocabulary = penn.WORDS

    @staticmethod
    def load(folders):
        """Return training and validation text, as numbers below 10,000."""
        folder = folders.ptb_dir
        if not folder or not pathlib.Path(folder, "ptb.train.txt").exists():
            raise app.UsageError(
                "The task ptb needs `--ptb_dir`, a folder with ptb.train.txt and "
                f"ptb.valid.txt. Received: --ptb_dir={folder}"
            )
        return [penn.read(folder, text) for text in ("train", "valid")]


class FineTuning(small.Mnist):
    """Classifies digits 5 to 9 with a network that was pretrained on 0 to 4.

    The last layer is new; all layers are trained. The metric is the mean cross-entropy
    of the test set.
    """

    name = "finetune"
    metric = "loss"
    higher_is_better = False

    def __init__(self, folders):
        super().__init__(folders)
        keras.utils.set_random_seed(0)
        network = small.Mnist.model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network.compile(keras.optimizers.Adam(_PRETRAINING_RATE), loss)
        images, labels = _digits(folders, "train", range(5))
        network.fit(images, labels, batch_size=_PRETRAINING_BATCH, verbose=0)
        self._pretrained = [layer.get_weights() for layer in network.layers[:-1]]

    @staticmethod
    def load(folders):
        """Return training and test set of digits 5 to 9, with labels 0 to 4."""
        return [_digits(folders, split, range(5, 10)) for split in ("train", "test")]

    def model(self):
        """Return the pretrained network with a random last layer."""
        network = small.Mnist.model()
        for layer, weights in zip(network.layers, self._pretrained, strict=False):
            layer.set_weights(weights)
        return network

    def evaluate(self, predict):
        """Return the mean cross-entropy per image."""
        images, labels = self.test
        return float(self._loss(labels, predict(images)))


class LoraFineTuning(FineTuning):
    """Fine-tunes with LoRA: trains two factors of rank 8, and the last layer."""

    name = "lora"
    rank = 8

    def model(self):
        """Return the network with LoRA, whose other layers are frozen."""
        network = super().model()
        *others, dense, _ = network.layers
        for layer in others:
            layer.trainable = False
        dense.enable_lora(self.rank)
        dense.bias.trainable = False
        return network


TASKS = {task.name: task for task in (Characters, Words, FineTuning, LoraFineTuning)}


def _digits(folders, split, digits):
    images, labels = small.read("mnist", folders.data_dir, split)
    mask = np.isin(labels, digits)
    return np.float32(images[mask]) / 255, np.int32(labels[mask] - min(digits))


def _keras_hub():
    try:
        import keras_hub
    except ImportError as error:
        raise app.UsageError(
            "This task trains KerasHub's GPT-2: `pip install 'tf_dgc[study]'`, "
            f"with Python 3.11 or newer. The import failed: {error}"
        ) from error
    return keras_hub
