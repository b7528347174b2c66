"""Remote calls: payloads of any shape arrive as 32-bit words."""

import gc
import threading

import numpy as np
import pytest
import tensorflow as tf

from tf_dgc._internals import rpc
from tf_dgc.multiworker.launch import launcher


@pytest.mark.workers
@pytest.mark.parametrize("shape", [(), (2, 3), (0,), (5,)])
def test_payload_of_any_shape_arrives_as_words(shape):
    """A foreign client does not know the server's signature."""
    (port,) = launcher.free_ports(1)
    server = rpc.Server(f"127.0.0.1:{port}", 1)
    client = tf.distribute.experimental.rpc.Client.create(
        "grpc", f"127.0.0.1:{port}", name=f"client{len(shape)}{shape[-1:]}"
    )
    payload = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    vector = tf.TensorSpec([None], tf.float32)

    def call():
        client.call("slot0", [tf.constant(payload)], vector).get_value()

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    slot, words = server.take()
    server.answer(slot, words)
    caller.join(20)
    assert not caller.is_alive()
    assert slot == 0
    np.testing.assert_array_equal(words, payload.ravel().view(np.int32))


@pytest.mark.workers
def test_unanswered_call_ends_with_the_server():
    """The call does not keep the server alive, unlike calls to TensorFlow's server."""
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
