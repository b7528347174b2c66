"""Remote calls: what a caller sends is words, whatever its shape."""

import gc
import threading

import numpy as np
import pytest
import tensorflow as tf

from tf_dgc._internals import rpc
from tf_dgc.multiworker.launch import launcher


@pytest.mark.workers
@pytest.mark.parametrize("shape", [(), (2, 3), (0,), (5,)])
def test_any_shape_is_words(shape):
    """As a stranger may send it: the signature holds in the server's process alone."""
    (port,) = launcher.free_ports(1)
    server = rpc.Server(f"127.0.0.1:{port}", 1)
    client = tf.distribute.experimental.rpc.Client.create(
        "grpc", f"127.0.0.1:{port}", name=f"stranger{len(shape)}{shape[-1:]}"
    )
    sent = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    vector = tf.TensorSpec([None], tf.float32)

    def call():
        client.call("slot0", [tf.constant(sent)], vector).get_value()

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    slot, words = server.take()
    server.answer(slot, words)
    caller.join(20)
    assert not caller.is_alive()
    assert slot == 0
    np.testing.assert_array_equal(words, sent.ravel().view(np.int32))


@pytest.mark.workers
def test_a_call_that_nobody_answers_ends_with_the_server():
    """And does not keep it: TensorFlow's waits for its calls when it is deleted."""
    (port,) = launcher.free_ports(1)
    server = rpc.Server(f"127.0.0.1:{port}", 1)
    client = rpc.Client(f"127.0.0.1:{port}", "unanswered", 60.0)
    codes = []
    caller = threading.Thread(
        target=lambda: codes.append(int(client.call(0, tf.zeros([3], tf.int32))[0])),
        daemon=True,
    )
    caller.start()
    server.take()
    del server
    gc.collect()
    caller.join(20)
    assert codes and codes[0] != 0
