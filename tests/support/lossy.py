"""Values after lossy coding, in NumPy."""

import numpy as np


def signs(values):
    """Return signs with the mean magnitude."""
    return np.where(values < 0, -1.0, 1.0) * np.float32(np.mean(np.abs(values)))


def largest(values, number):
    """Return the entries of largest magnitude, with zeros elsewhere."""
    least = np.sort(np.abs(values), axis=None)[-number]
    return np.where(np.abs(values) >= least, values, 0)


def levels(values, bucket, number):
    """Return the nearest of equidistant levels between a bucket's least and largest."""
    out = np.empty(values.size)
    for start in range(0, values.size, bucket):
        part = values.flat[start : start + bucket]
        least, step = part.min(), (part.max() - part.min()) / (number - 1)
        codes = np.floor((part - least) / step + 0.5) if step else np.zeros(part.size)
        out[start : start + bucket] = least + codes * step
    return out.reshape(values.shape)
