"""Rounds: run the exchanges of all tensors in lockstep, a few collectives for all.

In every round each tensor asks for one thing. All that are to be summed go into one
vector per dtype, all that are to be gathered into one buffer: so a round costs as many
collectives as there are kinds of requests, whatever the number of tensors.
"""

import itertools
from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tf_dgc.arguments import show
from tf_dgc.codecs import buffer, checks
from tf_dgc.collectives.requests import (
    Aggregation,
    AllGather,
    AllReduce,
    DenseOrEntries,
    Message,
    Reply,
    Request,
    Result,
    SparseEntries,
    to_dense_tensor,
)

# --- Packs: many tensors' requests as one collective, and its reply as many.


class AllReducePack:
    """Everything of one dtype that is to be summed, behind the non-finite flag.

    Args:
        requests: values to be summed, of any shape, by the part's number.
        finite: scalar bool, whether this worker's gradient was finite.

    Attributes:
        message: request of the collective, a vector behind the flag.
    """

    def __init__(self, requests: dict[int, tf.Tensor], finite: tf.Tensor):
        self._requests = requests
        dtype = next(iter(requests.values())).dtype
        flag = tf.cast(tf.logical_not(finite), dtype)[tf.newaxis]
        flat = [tf.reshape(values, [-1]) for values in requests.values()]
        self.message = AllReduce(tf.concat([flag, *flat], axis=0))

    def unpack(self, total: tf.Tensor) -> tuple[dict[int, tf.Tensor], tf.Tensor]:
        """Return the reply to each request, and the number of non-finite gradients."""
        sizes = [num_entries(values) for values in self._requests.values()]
        flag, *parts = tf.split(total, [1, *sizes])
        replies = {
            i: tf.reshape(
                part, tf.shape(values) if None in values.shape else values.shape
            )
            for (i, values), part in zip(self._requests.items(), parts, strict=True)
        }
        return replies, tf.cast(flag[0], tf.int32)


class AllGatherPack:
    """All words that are to be gathered, behind a header.

    Args:
        requests: words to be gathered, int32 vectors, by the part's number.
        agreed: fingerprint of what must be equal on all workers.
        finite: scalar bool, whether this worker's gradient was finite.

    Attributes:
        message: request of the collective, int32 words behind a header.
    """

    def __init__(self, requests: dict[int, tf.Tensor], agreed: int, finite: tf.Tensor):
        self._requests = requests
        self._agreed = agreed
        sizes = [num_entries(words) for words in requests.values()]
        self._length = buffer.HEADER_WORDS + sum(sizes)
        body = list(requests.values())
        self.message = AllGather(buffer.add_header(agreed, self._length, body, finite))

    def unpack(self, buffers: tf.Tensor) -> tuple[dict[int, tf.Tensor], tf.Tensor]:
        """Return the reply to each request, and the number of non-finite gradients."""
        words, nonfinite = buffer.remove_header(buffers, self._agreed, self._length)
        sizes = [num_entries(words) for words in self._requests.values()]
        parts = tf.split(words, sizes, axis=1)
        return dict(zip(self._requests, parts, strict=True)), nonfinite


def num_entries(values: tf.Tensor) -> int | tf.Tensor:
    """Return an int if it is known while tracing, else a scalar int64 tensor."""
    known = values.shape.num_elements()
    return tf.size(values, tf.int64) if known is None else known


def num_bytes(values: tf.Tensor) -> int | tf.Tensor:
    """Return an int if it is known while tracing, else a scalar int64 tensor."""
    return num_entries(values) * values.dtype.size


class TensorExchange(NamedTuple):
    """One tensor's share in a step.

    Attributes:
        label: name of the tensor, for errors.
        agreed: text of what must be equal on all workers, without spaces.
        stated: number of bytes that it may hand to the collectives; None if decided at
            run time.
        exchange: generator of the method, not yet started.
        narrow: dtype that the sum must fit into, if it is not that of the values.
    """

    label: str
    agreed: str
    stated: int | None
    exchange: Aggregation
    narrow: tf.DType | None = None


class PackedOutcome(NamedTuple):
    """What a step came to.

    Attributes:
        results: result of each part, in order.
        nonfinite: number of workers whose gradient was not finite, scalar int32.
        sent_bytes: number of bytes that one worker handed to the collectives: an int,
            or a scalar int64 tensor.
    """

    results: list[Result]
    nonfinite: tf.Tensor
    sent_bytes: int | tf.Tensor


PackedSteps: TypeAlias = Generator[list[Message], list[Reply], PackedOutcome]


def run_in_lockstep(parts: Sequence[TensorExchange], finite: tf.Tensor) -> PackedSteps:
    """Run all parts' exchanges as one.

    Args:
        parts: parts of all tensors, in the same order on all workers.
        finite: scalar bool, whether this worker's gradient was finite. It travels with
            every collective.

    Yields:
        The collectives of a round: `Sum`s of vectors of different dtypes, and at
        most one `Gather`.

    Raises:
        ValueError: if a part hands over more or less than it states.
        tf.errors.InvalidArgumentError: when run, for buffers that are refused, and sums
            that are not finite.
    """
    results: dict[int, Result] = {}
    replies: dict[int, tf.Tensor] = {}
    used: list[int | tf.Tensor] = [0] * len(parts)
    nonfinite, sent_bytes = tf.constant(0), 0
    for number in itertools.count():
        requests = _advance(parts, replies, results)
        if not requests:
            break
        for i, request in requests.items():
            used[i] = used[i] + num_bytes(request[0])
            _check_stated(parts[i], used[i], done=False)
        packs = _pack(parts, requests, number, finite)
        answers = yield [pack.message for pack in packs]
        replies = {}
        for pack, answer in zip(packs, answers, strict=True):
            found, nonfinite = pack.unpack(answer)
            replies.update(found)
            sent_bytes = sent_bytes + num_bytes(pack.message[0])
    for part, total in zip(parts, used, strict=True):
        _check_stated(part, total, done=True)
    ordered = [results[i] for i in range(len(parts))]
    return PackedOutcome(_finite_only(parts, ordered), nonfinite, sent_bytes)


def _advance(
    parts: Sequence[TensorExchange],
    replies: dict[int, tf.Tensor],
    results: dict[int, Result],
) -> dict[int, Request]:
    """Give every part its reply; return what those that are not done ask for."""
    requests = {}
    for i, part in enumerate(parts):
        if i in results:
            continue
        try:
            requests[i] = part.exchange.send(replies.get(i))
        except StopIteration as end:
            results[i] = end.value
            _check_result(part, end.value)
        else:
            _check_request(part, requests[i])
    return requests


def _check_request(part: TensorExchange, request: Request) -> None:
    if isinstance(request, AllReduce):
        right = request.values.dtype.is_floating or request.values.dtype == tf.int32
    elif isinstance(request, AllGather):
        right = request.words.dtype == tf.int32 and request.words.shape.rank == 1
    else:
        right = False
    if not right:
        raise ValueError(
            f"{part.label} must yield `Sum` of a float or int32 tensor, or `Gather` of "
            f"an int32 vector. Received: {show(request)}"
        )


def _check_result(part: TensorExchange, result: Result) -> None:
    if not isinstance(result, Result):
        raise ValueError(
            f"{part.label} must end with `return Result(...)`. Received: {show(result)}"
        )


def _pack(
    parts: Sequence[TensorExchange],
    requests: dict[int, Request],
    number: int,
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
        AllReducePack(s, finite) for s in sums.values()
    ]
    if gathers:
        agreed = round_fingerprint(number, [parts[i].agreed for i in gathers])
        packs.append(AllGatherPack(gathers, agreed, finite))
    return packs


def round_fingerprint(number: int, agreed: Sequence[str]) -> int:
    """Return the fingerprint of what a round gathers.

    Args:
        number: number of the round, from 0.
        agreed: text of every part, see `Part`.
    """
    return buffer.text_fingerprint([f"round:{number}", *agreed])


def _check_stated(part: TensorExchange, used: int | tf.Tensor, done: bool) -> None:
    if part.stated is None or not isinstance(used, int):
        return
    if used > part.stated or (done and used < part.stated):
        raise ValueError(
            f"{part.label} handed over a payload of another size than its compressor "
            f"states. `bytes` says {part.stated}; received: {used} bytes so far in all "
            "rounds"
        )


def _finite_only(
    parts: Sequence[TensorExchange], results: list[Result]
) -> list[Result]:
    """Return the results, to be had only if no sum overflowed."""
    narrow = [part.narrow for part in parts]
    sums = [_may_overflow(r.sum, n) for r, n in zip(results, narrow, strict=True)]
    return checks.require_finite_sums(
        sums, narrow, [part.label for part in parts], results
    )


def _may_overflow(total: DenseOrEntries, narrow: tf.DType | None) -> tf.Tensor:
    """Return what is finite if the sum is; of entries without adding them up."""
    if isinstance(total, tf.Tensor):
        return total
    rows = [total] if isinstance(total, SparseEntries) else total
    if len(rows) == 1:
        return rows[0].values
    most = tf.add_n([tf.reduce_max(tf.abs(row.values)) for row in rows])
    fits = tf.math.is_finite(tf.cast(most, narrow or most.dtype))
    return tf.cond(fits, lambda: most[tf.newaxis], lambda: to_dense_tensor(rows))
