"""What `adam.py` trains: a small GPT-2 on two texts, and a network to another task."""

import pathlib

import keras
import numpy as np
from absl import app

from tasks import penn, small

WIDTH, HEADS, LAYERS = 128, 4, 2
_AT_ONCE = 32  # pieces that are evaluated together
_PRETRAINED = 64, 1e-3  # batch and rate of Adam, for one pass


class Language(small.Task):
    """The next token, by KerasHub's GPT-2 of two layers with random weights.

    It has no dropout. A worker's step is of `batch_size` pieces of the text that begin
    anywhere; what is reported is the mean cross-entropy of a token of the validation
    text, in pieces that follow one another.
    """

    metric = "loss"
    higher_is_better = False
    batch_size = 16
    jit_compile = True  # three quarters of the time
    length = 64  # tokens of an example
    vocabulary: int

    @classmethod
    def model(cls):
        """Return the network, with weights drawn anew."""
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
        seen = {"token_ids": tokens, "padding_mask": keras.ops.ones_like(tokens)}
        logits = backbone.token_embedding(backbone(seen), reverse=True)
        return keras.Model(tokens, logits)

    def batch(self, random):
        """Return pieces of the text, and the same one token later."""
        starts = random.integers(0, len(self.train) - self.length, self.batch_size)
        return self._pieces(self.train, starts)

    def evaluate(self, predict):
        """Return the mean cross-entropy of a token, in nats."""
        starts = np.arange(0, len(self.test) - self.length, self.length)
        total = 0.0
        for first in range(0, len(starts), _AT_ONCE):
            chosen = starts[first : first + _AT_ONCE]
            inputs, targets = self._pieces(self.test, chosen)
            total += float(self._loss(targets, predict(inputs))) * len(chosen)
        return total / len(starts)

    def _pieces(self, text, starts):
        at = starts[:, np.newaxis] + np.arange(self.length)
        return text[at], text[at + 1]


class Characters(Language):
    """Characters of Shakespeare; 413,312 parameters."""

    name = "shakespeare"
    vocabulary = 65

    @staticmethod
    def load(folders):
        """Return training and validation text, as numbers below 65."""
        texts = "train", "validation"
        return [small.shakespeare(folders.data_dir, text) for text in texts]


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


class Adapted(small.Mnist):
    """Digits 5 to 9, by a network that has learned 0 to 4; all of it is trained.

    The last layer is new. What is reported is the mean cross-entropy on the test set.
    """

    name = "finetune"
    metric = "loss"
    higher_is_better = False

    def __init__(self, folders):
        super().__init__(folders)
        keras.utils.set_random_seed(0)
        network = small.Mnist.model()
        batch, rate = _PRETRAINED
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network.compile(keras.optimizers.Adam(rate), loss)
        images, labels = _digits(folders, "train", range(5))
        network.fit(images, labels, batch_size=batch, verbose=0)
        self._learned = [layer.get_weights() for layer in network.layers[:-1]]

    @staticmethod
    def load(folders):
        """Return training and test set of the other half, labels from 0 to 4."""
        return [_digits(folders, split, range(5, 10)) for split in ("train", "test")]

    def model(self):
        """Return the network that has learned, with a last layer drawn anew."""
        network = small.Mnist.model()
        for layer, weights in zip(network.layers, self._learned, strict=False):
            layer.set_weights(weights)
        return network

    def evaluate(self, predict):
        """Return the mean cross-entropy of an image."""
        images, labels = self.test
        return float(self._loss(labels, predict(images)))


class AdaptedByLora(Adapted):
    """The same by LoRA: two factors of rank 8 for a dense layer, and the last layer."""

    name = "lora"
    rank = 8

    def model(self):
        """Return the network, of which few weights are trained."""
        network = super().model()
        *others, dense, _ = network.layers
        for layer in others:
            layer.trainable = False
        dense.enable_lora(self.rank)
        dense.bias.trainable = False
        return network


TASKS = {task.name: task for task in (Characters, Words, Adapted, AdaptedByLora)}


def _digits(folders, split, chosen):
    images, labels = small.read("mnist", folders.data_dir, split)
    of_them = np.isin(labels, chosen)
    scaled = np.float32(images[of_them]) / 255
    return scaled, np.int32(labels[of_them] - min(chosen))


def _keras_hub():
    try:
        import keras_hub
    except ImportError as error:
        raise app.UsageError(
            "This task trains KerasHub's GPT-2: `pip install 'tf_dgc[study]'`, "
            f"with Python 3.11 or newer. It said: {error}"
        ) from error
    return keras_hub
