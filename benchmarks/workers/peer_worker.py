"""One worker of `step.py --peers`: the perceptron under PyTorch's own data parallelism.

    PYTHONPATH=benchmarks python benchmarks/workers/peer_worker.py SETTINGS

It is asked and answers as `step_worker.py` does. Gradients are averaged while the
backward pass goes on, in buckets, as PyTorch has it.
"""

import json
import os
import statistics
import sys
import time

import torch
from common import peers
from common.replies import answer, reply, take_standard_output
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

_DENSE_STEPS = 2  # the least that the PowerSGD hook takes
_WARMUP_STEPS = 5  # buckets are rebuilt after the first step
# The hook's later rounds begin when earlier ones end, so that with several buckets
# workers may ask in different orders, and gloo matches by order: one bucket for all.
_BUCKETS = {"torch-powersgd": 1 << 12}


def main(settings):
    """Build model and step; then do what the parent asks for."""
    replies = take_standard_output()
    torch.set_num_threads(settings["threads"])
    _connect()
    step, gradients, model = make_steps(settings)
    _times(step, _WARMUP_STEPS)
    variables = list(model.parameters())
    parameters = sum(v.numel() for v in variables)
    reply(
        replies,
        variables=len(variables),
        parameters=parameters,
        torch=torch.__version__,
        torch_onednn=torch.backends.mkldnn.is_available(),
    )
    answer(
        replies,
        lambda count: _times(step, count),
        lambda count: {"gradients_ms": statistics.median(_times(gradients, count))},
    )


def make_steps(settings):
    """Return a function that does a step, one for the gradients only, and the model."""
    torch.manual_seed(settings["rank"])
    inputs, units, classes = peers.PERCEPTRONS[settings["model"]]
    mode = settings["mode"]
    model = nn.parallel.DistributedDataParallel(
        _perceptron(inputs, units, classes), bucket_cap_mb=_BUCKETS.get(mode)
    )
    _compress(model, mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(peers.BATCH_SIZE, inputs)
    y = torch.randint(classes, (peers.BATCH_SIZE,))
    loss_of = nn.CrossEntropyLoss()

    def compute():
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        return loss

    def step():
        loss = compute()
        optimizer.step()
        return loss.item()

    def gradients():
        with model.no_sync():
            return compute().item()

    return step, gradients, model


def _perceptron(inputs, units, classes):
    return nn.Sequential(
        nn.Linear(inputs, units),
        nn.ReLU(),
        nn.Linear(units, units),
        nn.ReLU(),
        nn.Linear(units, classes),
    )


def _compress(model, mode):
    if mode == "torch-fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if mode == "torch-powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, peers.RANK, start_powerSGD_iter=_DENSE_STEPS
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _connect():
    """Meet the others, at the addresses that TensorFlow's workers have too."""
    config = json.loads(os.environ["TF_CONFIG"])
    addresses, rank = config["cluster"]["worker"], config["task"]["index"]
    local = addresses[0].startswith("127.")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if local else "eth0"
    distributed.init_process_group(
        "gloo", f"tcp://{addresses[0]}", rank=rank, world_size=len(addresses)
    )


def _times(step, count):
    """Return the times of steps in ms."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - start))
    return times


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
