"""The wire format in plain Python, written from docs/contributing/wire_format.md alone.

A layout is a list of `(size, dtype, value_type)`, where all but the size are strings.
The value type of an uncompressed tensor is "exempt", followed by a colon and a type if
it is coded. A selection is `(positions, values)`, NumPy arrays; positions are None for
an uncompressed tensor.
"""

import itertools
import math
import struct
import zlib

import numpy as np

MAGIC = 0x44474301
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
BLOCK = 32
# Bits of a value, exponent of the largest value, and range of the scale.
SHARED = {"mxint8": (8, 0, 8, 254), "mxfp4": (4, 2, 3, 252)}
LARGEST = {
    "float32": float(np.finfo(np.float32).max),
    "bfloat16": float.fromhex("0x1.fep127"),
    "float16": 65504.0,
}


def encode(layout, counts, selections, finite):
    """Return the buffer of one worker as uint32 words."""
    body = []
    for item, k, (positions, values) in zip(layout, counts, selections, strict=True):
        size, dtype, value_type = item
        if is_uncompressed(value_type):
            body += value_words(values, coded_as(value_type, dtype))
        else:
            low, high = _position_bits(positions, size, k)
            body += _to_words(low) + _to_words(high) + value_words(values, value_type)
    header = [MAGIC, fingerprint(layout), 0 if finite else 1, 5 + len(body), 0]
    return seal(np.array(header + body, np.uint32))


def decode(words, layout, counts):
    """Return the selections (values as float64) and whether the gradient was finite.

    Raises:
        ValueError: for a malformed buffer.
    """
    words = [int(w) for w in words]
    require(len(words) == length(layout, counts), "length")
    require(words[0] == MAGIC, "version")
    require(words[1] == fingerprint(layout), "fingerprint")
    require(words[2] in {0, 1}, "flags")
    require(words[3] == len(words), "length word")
    require(words[4] == checksum(words), "checksum")
    rest = words[5:]
    selections = []
    for (size, dtype, value_type), k in zip(layout, counts, strict=True):
        positions = None
        if is_uncompressed(value_type):
            k, value_type = size, coded_as(value_type, dtype)
        else:
            width = low_width(size, k)
            low = _take(rest, k * width)
            high = _take(rest, k + ((size - 1) >> width))
            positions = _positions(low, high, size, k)
        selections.append((positions, values_of(rest, k, value_type)))
    assert not rest
    return selections, words[2] == 0


def length(layout, counts):
    """Return the number of words of a buffer."""
    words = 5
    for (size, dtype, value_type), k in zip(layout, counts, strict=True):
        if is_uncompressed(value_type):
            words += num_value_words(size, coded_as(value_type, dtype))
            continue
        width = low_width(size, k)
        words += math.ceil(k * width / 32)
        words += math.ceil((k + ((size - 1) >> width)) / 32)
        words += num_value_words(k, value_type)
    return words


def is_uncompressed(value_type):
    return value_type.partition(":")[0] == "exempt"


def coded_as(value_type, dtype):
    """Return the type of an uncompressed tensor's values."""
    return value_type.partition(":")[2] or dtype


def num_value_words(k, value_type):
    """Return the number of words of k values."""
    return {
        "float32": k,
        "float64": 2 * k,
        "bfloat16": math.ceil(k / 2),
        "float16": math.ceil(k / 2),
        "sign": 1 + math.ceil(k / 32),
        "mxint8": math.ceil(math.ceil(k / 32) / 4) + math.ceil(k / 4),
        "mxfp4": math.ceil(math.ceil(k / 32) / 4) + math.ceil(k / 8),
    }[value_type]


def fingerprint(layout):
    text = "tf_dgc 1"
    for size, dtype, value_type in layout:
        text += f" {size}:{dtype}:{value_type}"
    return zlib.crc32(text.encode("ascii"))


def checksum(words):
    return sum((2 * i + 1) * int(w) for i, w in enumerate(words) if i != 4) % 2**32


def seal(words):
    """Return the words with the correct checksum."""
    words = np.array(words, np.uint32)
    words[4] = checksum(words)
    return words


def low_width(size, k):
    width = 0
    while k * 2 ** (width + 1) <= size:
        width += 1
    return width


def rounded(values, value_type):
    """Return values after encoding and decoding, as float64."""
    words = value_words(np.asarray(values), value_type)
    return values_of(words, len(values), value_type)


def require(condition, what):
    if not condition:
        raise ValueError(f"wrong {what}")


# --- bits -----------------------------------------------------------------------------


def _to_words(bits):
    words = [0] * math.ceil(len(bits) / 32)
    for b, bit in enumerate(bits):
        words[b // 32] |= int(bit) << (b % 32)
    return words


def _take(words, num_bits):
    """Remove a stream's words from the front and return its bits."""
    num_words = math.ceil(num_bits / 32)
    stream = words[:num_words]
    del words[:num_words]
    bits = [(w >> b) & 1 for w in stream for b in range(32)]
    require(not any(bits[num_bits:]), "unused bits")
    return bits[:num_bits]


def _bits_of(number, width):
    return [(number >> b) & 1 for b in range(width)]


def _number(bits):
    return sum(bit << b for b, bit in enumerate(bits))


# --- positions ------------------------------------------------------------------------


def _position_bits(positions, size, k):
    width = low_width(size, k)
    low, high = [], [0] * (k + ((size - 1) >> width))
    for i, p in enumerate(int(p) for p in positions):
        low += _bits_of(p, width)
        high[(p >> width) + i] = 1
    return low, high


def _positions(low, high, size, k):
    width = low_width(size, k)
    set_bits = [b for b, bit in enumerate(high) if bit]
    require(len(set_bits) == k, "number of positions")
    positions = [
        ((b - i) << width) + _number(low[i * width : (i + 1) * width])
        for i, b in enumerate(set_bits)
    ]
    ascending = all(p < q for p, q in itertools.pairwise(positions))
    require(ascending and positions[-1] < size, "positions")
    return np.array(positions)


# --- values ---------------------------------------------------------------------------


def value_words(values, value_type):
    values = [float(v) for v in values]
    if value_type == "float64":
        return [w for v in values for w in struct.unpack("<II", struct.pack("<d", v))]
    values = [_float32(v) for v in values]
    if value_type == "float32":
        return [_float32_bits(v) for v in values]
    if value_type == "sign":
        magnitude = _float32(math.fsum(abs(v) for v in values) / len(values))
        return [_float32_bits(magnitude), *_to_words([v < 0 for v in values])]
    if value_type in SHARED:
        return _block_words(values, value_type)
    to_bits = {"bfloat16": _bfloat16_bits, "float16": _float16_bits}[value_type]
    return _to_words([bit for v in values for bit in _bits_of(to_bits(v), 16)])


def values_of(words, k, value_type):
    if value_type == "sign":
        (magnitude,) = struct.unpack("<f", struct.pack("<I", words.pop(0)))
        require(math.copysign(1, magnitude) > 0, "magnitude")
        values = [-magnitude if negative else magnitude for negative in _take(words, k)]
    elif value_type in SHARED:
        values = _block_values(words, k, value_type)
    else:
        width = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}[
            value_type
        ]
        bits = _take(words, k * width)
        numbers = [_number(bits[i * width : (i + 1) * width]) for i in range(k)]
        values = [_from_bits(number, value_type) for number in numbers]
    require(all(map(math.isfinite, values)), "values: not finite")
    return np.array(values)


def _block_words(values, value_type):
    width, largest_exponent, least, _ = SHARED[value_type]
    scales, codes = [], []
    for begin in range(0, len(values), BLOCK):
        block = values[begin : begin + BLOCK]
        if not all(map(math.isfinite, block)):
            scale, numbers = 255, [0] * len(block)
        else:
            exponent = (
                math.frexp(max(map(abs, block)))[1] - 1
            )  # 0 takes the least scale
            scale = (
                max(127 + exponent - largest_exponent, least) if any(block) else least
            )
            to_code = _int8_code if width == 8 else _fp4_code
            numbers = [to_code(math.ldexp(v, 127 - scale)) for v in block]
        scales += _bits_of(scale, 8)
        codes += [bit for number in numbers for bit in _bits_of(number, width)]
    return _to_words(scales) + _to_words(codes)


def _block_values(words, k, value_type):
    width, _, least, largest = SHARED[value_type]
    bits = _take(words, 8 * math.ceil(k / BLOCK))
    scales = [_number(bits[i : i + 8]) for i in range(0, len(bits), 8)]
    require(all(least <= scale <= largest for scale in scales), "scale")
    bits = _take(words, k * width)
    codes = [_number(bits[i : i + width]) for i in range(0, len(bits), width)]
    if width == 8:
        levels = [(c - 256 if c >= 128 else c) / 64 for c in codes]
    else:
        levels = [-FP4[c - 8] if c >= 8 else FP4[c] for c in codes]
    return [math.ldexp(v, scales[i // BLOCK] - 127) for i, v in enumerate(levels)]


def _int8_code(scaled):
    return max(-127, min(round(64 * scaled), 127)) % 256


def _fp4_code(scaled):
    """Return the code of the nearest level, the even one of two; no negative zero."""
    code = min(range(8), key=lambda c: (abs(FP4[c] - abs(scaled)), c % 2))
    return code + 8 if code and scaled < 0 else code


def _clamped(value, value_type):
    if math.isnan(value):
        return value
    return max(-LARGEST[value_type], min(value, LARGEST[value_type]))


def _float32(value):
    return struct.unpack("<f", struct.pack("<f", _clamped(value, "float32")))[0]


def _float32_bits(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def _float16_bits(value):
    return struct.unpack("<H", struct.pack("<e", _clamped(value, "float16")))[0]


def _bfloat16_bits(value):
    """Round to the nearest, ties to even."""
    below = _float32_bits(_clamped(value, "bfloat16")) >> 16
    candidates = [below, below + 1]
    distance = [abs(_from_bits(c, "bfloat16") - value) for c in candidates]
    if distance[0] == distance[1]:
        return candidates[below % 2]
    return candidates[distance[1] < distance[0]]


def _from_bits(number, value_type):
    if value_type == "bfloat16":
        number <<= 16
    source = {"float64": "<Q", "float16": "<H"}.get(value_type, "<I")
    target = {"float64": "<d", "float16": "<e"}.get(value_type, "<f")
    return struct.unpack(target, struct.pack(source, number))[0]
