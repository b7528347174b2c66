"""Runs the exchanges of all tensors in lockstep, with few collectives per round.

In each round every tensor yields one request. All tensors to sum are concatenated to
one vector per dtype, all words to gather to one buffer. So the number of collectives
does not grow with the number of tensors.
"""

import itertools
from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tf_dgc.arguments import show
from tf_dgc.codecs import buffer, checks
from tf_dgc.codecs.bits import num_bytes, num_entries
from tf_dgc.collectives.requests import (
    Aggregation,
    AllGather,
    AllReduce,
    DenseOrEntries,
    Reply,
    Request,
    Result,
    SparseEntries,
    TensorRequest,
    to_dense_tensor,
)


class TensorExchange(NamedTuple):
    """The exchange of one tensor in a step."""

    label: str  # for errors
    signature: str  # the same on all workers, without spaces
    num_bytes: int | None  # of all rounds; None if known only at run time
    exchange: Aggregation  # not started
    narrow: tf.DType | None = None  # dtype that the sum must fit into, if narrower


class PackedOutcome(NamedTuple):
    """Results of the exchanges of all tensors."""

    results: list[Result]
    nonfinite: tf.Tensor  # number of workers, scalar int32
    sent_bytes: int | tf.Tensor  # of one worker: an int, or scalar int64


PackedSteps: TypeAlias = Generator[list[Request], list[Reply], PackedOutcome]


def run_in_lockstep(
    exchanges: Sequence[TensorExchange], finite: tf.Tensor
) -> PackedSteps:
    """Run the exchanges of all tensors as one; each request carries the flag `finite`.

    Each round is an `AllReduce` per dtype and at most one `AllGather`. An exchange that
    sends other than the bytes that it states raises `ValueError`.
    """
    results: dict[int, Result] = {}
    replies: dict[int, tf.Tensor] = {}
    bytes_by_tensor: list[int | tf.Tensor] = [0] * len(exchanges)
    nonfinite, sent_bytes = tf.constant(0), 0
    for round_number in itertools.count():
        requests = _advance(exchanges, replies, results)
        if not requests:
            break
        for i, request in requests.items():
            bytes_by_tensor[i] = bytes_by_tensor[i] + num_bytes(request[0])
            _check_num_bytes(exchanges[i], bytes_by_tensor[i], done=False)
        packs = _pack(exchanges, requests, round_number, finite)
        packed_replies = yield [pack.request for pack in packs]
        replies = {}
        for pack, packed_reply in zip(packs, packed_replies, strict=True):
            unpacked, nonfinite = pack.unpack(packed_reply)
            replies.update(unpacked)
            sent_bytes = sent_bytes + num_bytes(pack.request[0])
    for exchange, total in zip(exchanges, bytes_by_tensor, strict=True):
        _check_num_bytes(exchange, total, done=True)
    ordered = [results[i] for i in range(len(exchanges))]
    return PackedOutcome(_require_finite(exchanges, ordered), nonfinite, sent_bytes)


class AllReducePack:
    """All values of one dtype to sum, as one request, after a flag.

    The flag is 1 if this worker's gradient was not finite.
    """

    def __init__(self, values: dict[int, tf.Tensor], finite: tf.Tensor):
        self._values = values
        dtype = next(iter(values.values())).dtype
        flag = tf.cast(tf.logical_not(finite), dtype)[tf.newaxis]
        flat = [tf.reshape(v, [-1]) for v in values.values()]
        self.request = AllReduce(tf.concat([flag, *flat], axis=0))

    def unpack(self, total: tf.Tensor) -> tuple[dict[int, tf.Tensor], tf.Tensor]:
        """Return the sum of each tensor, and the number of non-finite gradients."""
        sizes = [num_entries(values) for values in self._values.values()]
        flag, *sums = tf.split(total, [1, *sizes])
        replies = {
            i: tf.reshape(
                flat, tf.shape(values) if None in values.shape else values.shape
            )
            for (i, values), flat in zip(self._values.items(), sums, strict=True)
        }
        return replies, tf.cast(flag[0], tf.int32)


class AllGatherPack:
    """All words to gather, as one request, after a header."""

    def __init__(
        self, words: dict[int, tf.Tensor], fingerprint: int, finite: tf.Tensor
    ):
        self._words = words
        self._fingerprint = fingerprint
        self._sizes = [num_entries(w) for w in words.values()]
        self._length = buffer.HEADER_WORDS + sum(self._sizes)
        self.request = AllGather(
            buffer.add_header(fingerprint, self._length, list(words.values()), finite)
        )

    def unpack(self, buffers: tf.Tensor) -> tuple[dict[int, tf.Tensor], tf.Tensor]:
        """Return the words of each tensor, and the number of non-finite gradients."""
        words, nonfinite = buffer.remove_header(
            buffers, self._fingerprint, self._length
        )
        parts = tf.split(words, self._sizes, axis=1)
        return dict(zip(self._words, parts, strict=True)), nonfinite


def round_fingerprint(round_number: int, signatures: Sequence[str]) -> int:
    """Return the fingerprint of the buffer that a round gathers."""
    return buffer.text_fingerprint([f"round:{round_number}", *signatures])


def _advance(
    exchanges: Sequence[TensorExchange],
    replies: dict[int, tf.Tensor],
    results: dict[int, Result],
) -> dict[int, TensorRequest]:
    """Send each exchange its reply; return the requests of those that continue."""
    requests = {}
    for i, exchange in enumerate(exchanges):
        if i in results:
            continue
        try:
            requests[i] = exchange.exchange.send(replies.get(i))
        except StopIteration as end:
            results[i] = end.value
            _check_result(exchange, end.value)
        else:
            _check_request(exchange, requests[i])
    return requests


def _check_request(exchange: TensorExchange, request: TensorRequest) -> None:
    if isinstance(request, AllReduce):
        dtype = request.values.dtype
        is_valid = dtype.is_floating or dtype == tf.int32
    elif isinstance(request, AllGather):
        is_valid = request.words.dtype == tf.int32 and request.words.shape.rank == 1
    else:
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"{exchange.label} must yield `AllReduce` of a float or int32 tensor, or "
            f"`AllGather` of an int32 vector. Received: {show(request)}"
        )


def _check_result(exchange: TensorExchange, result: Result) -> None:
    if not isinstance(result, Result):
        raise ValueError(
            f"{exchange.label} must end with `return Result(...)`. "
            f"Received: {show(result)}"
        )


def _check_num_bytes(
    exchange: TensorExchange, sent: int | tf.Tensor, done: bool
) -> None:
    stated = exchange.num_bytes
    if stated is None or not isinstance(sent, int):
        return
    if sent > stated or (done and sent < stated):
        raise ValueError(
            f"{exchange.label} must send as many bytes as its method `bytes` states, "
            f"{stated}. Received: {sent} bytes in all rounds so far"
        )


def _pack(
    exchanges: Sequence[TensorExchange],
    requests: dict[int, TensorRequest],
    round_number: int,
    finite: tf.Tensor,
) -> list[AllReducePack | AllGatherPack]:
    sums: dict[tf.DType, dict[int, tf.Tensor]] = {}
    gathers: dict[int, tf.Tensor] = {}
    for i, request in requests.items():
        if isinstance(request, AllReduce):
            sums.setdefault(request.values.dtype, {})[i] = request.values
        else:
            gathers[i] = request.words
    packs: list[AllReducePack | AllGatherPack] = [
        AllReducePack(values, finite) for values in sums.values()
    ]
    if gathers:
        signatures = [exchanges[i].signature for i in gathers]
        fingerprint = round_fingerprint(round_number, signatures)
        packs.append(AllGatherPack(gathers, fingerprint, finite))
    return packs


def _require_finite(
    exchanges: Sequence[TensorExchange], results: list[Result]
) -> list[Result]:
    narrow = [exchange.narrow for exchange in exchanges]
    sums = [_overflow_witness(r.sum, n) for r, n in zip(results, narrow, strict=True)]
    labels = [exchange.label for exchange in exchanges]
    return checks.require_finite_sums(sums, narrow, labels, results)


def _overflow_witness(total: DenseOrEntries, narrow: tf.DType | None) -> tf.Tensor:
    """Return a tensor that is finite exactly if the sum is.

    Adds up several `SparseEntries` only if their largest magnitudes could overflow.
    """
    if isinstance(total, tf.Tensor):
        return total
    rows = [total] if isinstance(total, SparseEntries) else total
    if len(rows) == 1:
        return rows[0].values
    bound = tf.add_n([tf.reduce_max(tf.abs(row.values)) for row in rows])
    fits = tf.math.is_finite(tf.cast(bound, narrow or bound.dtype))
    return tf.cond(fits, lambda: bound[tf.newaxis], lambda: to_dense_tensor(rows))
