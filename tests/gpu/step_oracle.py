"""The fused step in NumPy with exact bits, for up to 10^8 entries.

Written from wire_format.md and the comments of `custom_ops/cpu/compress.h`. All
arithmetic is in float32, with one rounding per operation.
"""

import dataclasses

import numpy as np
import wire_reference

MAGIC = 0x44474301


def type_name(numbers):
    """Return the type of an array's numbers; uint16 holds the bits of bfloat16."""
    return "bfloat16" if numbers.dtype == np.uint16 else numbers.dtype.name


@dataclasses.dataclass
class Case:
    """One tensor of a step.

    Attributes:
        gradient: [size] float32, float16, or uint16: the bits of bfloat16.
        k: number of entries to send.
        value_type: type on the wire; "exempt" for an uncompressed tensor, with a colon
            and a type if it is coded.
        velocity: [size] float32, changed by a step.
        residual: [size] float32, changed by a step.
        scale: factor of the gradient.
        offset: first position in the order of ties.
        shift: number of entries by which the device's arrays are out of alignment.
        largest: largest magnitude that is sent of an entry.
        divisor: [5] float64 as in `tf_dgc::Divisor`; or None.
        moment: [size] float32, second moment of the divisor; changed by a step.
    """

    gradient: np.ndarray
    k: int
    value_type: str = "float32"
    velocity: np.ndarray = None
    residual: np.ndarray = None
    scale: float = 1.0
    offset: int = 0
    shift: int = 0
    largest: float = np.inf
    divisor: np.ndarray = None
    moment: np.ndarray = None

    def __post_init__(self):
        if self.velocity is None:
            self.velocity = np.zeros(self.size, np.float32)
        if self.residual is None:
            self.residual = np.zeros(self.size, np.float32)
        if self.moment is None:
            self.moment = np.zeros(self.size, np.float32)

    @property
    def size(self):
        return self.gradient.size

    @property
    def gradient_type(self):
        return type_name(self.gradient)

    def copy(self):
        """Return a case with a copy of the state."""
        return dataclasses.replace(
            self,
            velocity=self.velocity.copy(),
            residual=self.residual.copy(),
            moment=self.moment.copy(),
        )


@dataclasses.dataclass(frozen=True)
class Rule:
    """How all tensors of a step are accumulated."""

    name: str = "momentum"
    momentum: float = 0.75
    masking: bool = True


def step(cases, rule, fingerprint):
    """Do a step on the cases' state; return the buffer, [words] uint32."""
    with np.errstate(all="ignore"):
        finite = _accumulate(cases, rule)
        parts = [_send(case, rule) for case in cases]
    return seal(np.concatenate([_header(fingerprint, finite), *parts]))


def seal(words):
    """Return the words with the correct length and checksum."""
    words = words.copy()
    words[3] = words.size
    words[4] = 0
    factors = 2 * np.arange(words.size, dtype=np.uint32) + np.uint32(1)
    words[4] = np.sum(factors * words, dtype=np.uint32)
    return words


def chosen(residual, k, offset):
    """Return the ascending positions of the k largest magnitudes.

    Ties are broken in cyclic order from `offset`.
    """
    magnitude = np.abs(residual)
    cut = np.partition(magnitude, residual.size - k)[residual.size - k]
    above = np.flatnonzero(magnitude > cut)
    ties = np.flatnonzero(magnitude == cut)
    first = np.searchsorted(ties, offset)
    chosen_ties = ties[(first + np.arange(k - above.size)) % ties.size]
    return np.sort(np.concatenate([above, chosen_ties]))


def encode(size, positions, values, value_type):
    """Return a tensor's words, and the decoded values."""
    k = positions.size
    width = (size // k).bit_length() - 1
    low = positions[:, None] >> np.arange(width) & 1
    high = np.zeros(k + ((size - 1) >> width), np.uint8)
    high[(positions >> width) + np.arange(k)] = 1
    words, coded = _encode_values(values, value_type)
    return np.concatenate([pack(low.astype(np.uint8)), pack(high), words]), coded


def pack(bits):
    """Return a stream of bits as words."""
    data = np.packbits(bits.ravel(), bitorder="little")
    return np.pad(data, (0, -data.size % 4)).view(np.uint32)


# --- the stages of a step -------------------------------------------------------------


def _accumulate(cases, rule):
    """Accumulate all gradients; return whether all entries are finite."""
    finite = True
    for case in cases:
        gradient, gradient_is_finite = _divide(case)
        u, v = _add(case, rule, gradient)
        fits = np.isfinite(v)
        u0, v0 = _add(case, rule, np.zeros(case.size, np.float32))
        v0 = np.where(np.isfinite(v0), v0, case.residual)
        case.velocity, case.residual = np.where(fits, u, u0), np.where(fits, v, v0)
        finite = finite and gradient_is_finite and bool(fits.all())
    return finite


def _divide(case):
    """Return the (divided) gradient to accumulate, and whether it was finite."""
    scale = np.float32(case.scale)
    gradient = scale * widen(case.gradient)
    if case.divisor is None or not case.divisor[0]:
        return gradient, True
    if np.isnan(scale):
        gradient = np.zeros(case.size, np.float32)
    factor, rest, epsilon, share, largest = np.float32(case.divisor)
    limit = np.finfo(np.float32).max
    square = factor * (gradient * gradient)
    square = np.where(square < limit, square, limit)
    case.moment = case.moment + rest * (square - case.moment)
    root = np.sqrt(case.moment) + epsilon
    quotient = np.where(root == 0, np.float32(0), share * gradient / root)
    below = np.where(quotient < largest, quotient, largest)
    return np.where(below > -largest, below, -largest), not np.isnan(scale)


def _add(case, rule, gradient):
    m = np.float32(rule.momentum)
    u, v = case.velocity, case.residual
    if rule.name == "none":
        return u, v + gradient
    if rule.name == "momentum":
        u = m * u + gradient
        return u, v + u
    u = m * (u + gradient)
    return u, v + (u + gradient)


def _send(case, rule):
    """Return the tensor's words, and subtract the sent values from its state."""
    if wire_reference.is_uncompressed(case.value_type):
        coded_as = wire_reference.coded_as(case.value_type, "float32")
        words, sent = _encode_values(_within(case, case.residual), coded_as)
        case.residual = case.residual - sent
        return words
    positions = chosen(case.residual, case.k, case.offset)
    entries = case.residual[positions]
    values = _within(case, entries)
    words, coded = encode(case.size, positions, values, case.value_type)
    case.residual = case.residual.copy()
    case.residual[positions] = entries - coded
    if rule.masking and rule.name != "none" and case.k < case.size:
        case.velocity = case.velocity.copy()
        case.velocity[positions] = 0
    return words


def _within(case, values):
    return np.clip(values, np.float32(-case.largest), np.float32(case.largest))


def _header(fingerprint, finite):
    return np.array([MAGIC, fingerprint, 0 if finite else 1, 0, 0], np.uint32)


# --- number formats -------------------------------------------------------------------


def widen(x):
    """Return float32 numbers from float32, float16, or the bits of bfloat16."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def to_bfloat16(x):
    """Return the bits of float32 numbers, rounded to nearest even and saturated."""
    bits = x.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    overflows = np.isfinite(x) & ((rounded & 0x7FFF) >= 0x7F80)
    return np.where(overflows, rounded & 0x8000 | 0x7F7F, rounded).astype(np.uint16)


def _encode_values(values, value_type):
    if value_type == "float32":
        return values.view(np.uint32), values
    if value_type == "sign":
        mean = np.float32(np.sum(np.abs(values), dtype=np.float64) / values.size)
        negative = values < 0
        words = np.concatenate([mean.reshape(1).view(np.uint32), pack(negative)])
        return words, np.where(negative, -mean, mean)
    if value_type in wire_reference.SHARED:
        words = np.array(wire_reference.value_words(values, value_type), np.uint32)
        return words, wire_reference.rounded(values, value_type).astype(np.float32)
    if value_type == "bfloat16":
        coded = to_bfloat16(values)
    else:
        coded = np.clip(values, -65504, 65504).astype(np.float16)
    halves = np.pad(coded.view(np.uint16), (0, coded.size % 2))
    return halves.view(np.uint32), widen(coded)
