"""Messages: NumPy and TensorFlow write the same words; damaged ones are rejected."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dgc.multiworker.launch import launcher
from tf_dgc.server import client, messages
from tf_dgc.server.client import RequestMessage
from tf_dgc.server.messages import REPLY, REQUEST, InvalidMessageError, Kind, Status

BODY = np.array([5, -7, 2**31 - 1, -(2**31)], np.int32)


def request(**overrides):
    fields = {"kind": Kind.PUSH, "worker": 3, "incarnation": 2**61 + 5, "number": 77}
    fields |= {"step": 12, "rate": 0.1, "part": 1, "parts": 2, **overrides}
    return messages.add_frame(
        REQUEST, BODY, secret=messages.secret_words("between us"), **fields
    )


def reply(**overrides):
    fields = {"status": Status.DONE, "incarnation": 2**61 + 5, "number": 77}
    return messages.add_frame(
        REPLY, BODY, **{**fields, "clock": 9, "parts": 1, **overrides}
    )


def test_request_round_trip():
    head, body = messages.remove_frame(REQUEST, request())
    assert head["kind"] == Kind.PUSH
    assert (head["worker"], head["number"], head["step"]) == (3, 77, 12)
    assert (head["incarnation"], head["rate"]) == (2**61 + 5, 0.1)
    np.testing.assert_array_equal(body, BODY)


def test_tensorflow_frames_the_same_words(monkeypatch):
    monkeypatch.setenv(messages.SECRET_VARIABLE, "between us")
    message = RequestMessage(
        tf.constant(int(Kind.PUSH)),
        tf.constant(12, tf.int64),
        tf.constant(0.1, tf.float64),
        tf.constant(1),
        tf.constant(2),
    )
    number = tf.constant(77, tf.int64)
    words = client.frame_request(message, tf.constant(BODY), number, 3, 2**61 + 5)
    np.testing.assert_array_equal(words.numpy(), request())


def test_tensorflow_reads_replies():
    number = tf.constant(77, tf.int64)
    is_valid, answer = client.parse_reply(tf.constant(reply()), number, 2**61 + 5)
    assert is_valid
    assert (answer.status, answer.clock, answer.parts) == (Status.DONE, 9, 1)
    np.testing.assert_array_equal(answer.body, BODY)


@pytest.mark.parametrize(
    "words",
    [
        reply(number=76),
        reply(incarnation=5),
        np.zeros([0], np.int32),
        np.zeros([3], np.int32),
        reply()[:-1],
        reply() + (np.arange(len(reply())) == 14),
    ],
    ids=["number", "process", "empty", "short", "cut", "damaged"],
)
def test_foreign_or_damaged_reply_is_rejected(words):
    number = tf.constant(77, tf.int64)
    is_valid, _ = client.parse_reply(tf.constant(words, tf.int32), number, 2**61 + 5)
    assert not is_valid


def test_refusal_text():
    text = messages.encode_text('no: "why" é')
    fields = {"status": Status.REFUSED, "incarnation": 5, "number": 7, "parts": 1}
    words = tf.constant(messages.add_frame(REPLY, text, **fields))
    is_valid, answer = client.parse_reply(words, tf.constant(7, tf.int64), 5)
    assert is_valid
    assert client.reply_text(answer.body).numpy() == rb'no: "why" \xe9'
    for number, process in [(8, 5), (7, 6)]:  # of another request or process
        is_valid, _ = client.parse_reply(words, tf.constant(number, tf.int64), process)
        assert not is_valid


@pytest.mark.parametrize("position", range(len(request())))
def test_changed_word_raises(position):
    words = request()
    words[position] ^= 1 << (position % 32)
    with pytest.raises(InvalidMessageError):
        messages.remove_frame(REQUEST, words)


@pytest.mark.parametrize("words", [request()[:10], request()[:-1], np.zeros(40, "<i4")])
def test_malformed_message_raises(words):
    with pytest.raises(InvalidMessageError):
        messages.remove_frame(REQUEST, words)


def test_head_of_an_incomplete_message():
    assert messages.read_head(request())["number"] == 77
    assert messages.read_head(np.zeros([0], "<i4"))["number"] == 0
    assert messages.read_head(request()[:9])["incarnation"] == 2**61 + 5


def test_secrets(monkeypatch):
    assert messages.secret_words("") == [0] * 4
    assert messages.secret_words("a") != messages.secret_words("b")
    monkeypatch.setenv(messages.SECRET_VARIABLE, "a")
    assert messages.secret_words() == messages.secret_words("a")
    assert messages.SECRET_VARIABLE == launcher.SECRET_VARIABLE


def test_parts():
    max_words = messages.MAX_WORDS
    body = np.arange(2 * max_words + 3, dtype=np.int32)
    assert [messages.num_parts(n) for n in (0, 1, max_words, max_words + 1)] == [
        1,
        1,
        1,
        2,
    ]
    parts = [messages.part_of(body, i) for i in range(messages.num_parts(len(body)))]
    np.testing.assert_array_equal(np.concatenate(parts), body)
    assert 4 * (max_words + REQUEST.itemsize // 4) < 4 * 2**20
