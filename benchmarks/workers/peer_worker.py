"""Worker process of `step.py --peers`: a perceptron with PyTorch's data parallelism.

    PYTHONPATH=benchmarks python benchmarks/workers/peer_worker.py SETTINGS

Requests and answers are those of `step_worker.py`. PyTorch averages gradients in
buckets during the backward pass.
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

_DENSE_STEPS = 2  # the least that the PowerSGD hook allows
_WARMUP_STEPS = 5  # PyTorch rebuilds buckets after the first step
# Collectives of the hook's later rounds start when earlier ones end. With several
# buckets their order may differ between workers, and gloo matches them by order.
_BUCKET_MB = {"torch-powersgd": 1 << 12}  # one bucket for all


def main(settings):
    """Build model and step, and answer the requests of the benchmark."""
    replies = take_standard_output()
    torch.set_num_threads(settings["threads"])
    _connect()
    step, gradients, model = create_steps(settings)
    _time_steps(step, _WARMUP_STEPS)
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
        lambda count: _time_steps(step, count),
        lambda count: {
            "gradients_ms": statistics.median(_time_steps(gradients, count))
        },
    )


def create_steps(settings):
    """Return functions that take a step and only its gradients, and the model."""
    torch.manual_seed(settings["rank"])
    inputs, units, classes = peers.PERCEPTRONS[settings["model"]]
    mode = settings["mode"]
    model = nn.parallel.DistributedDataParallel(
        _perceptron(inputs, units, classes), bucket_cap_mb=_BUCKET_MB.get(mode)
    )
    _register_hook(model, mode)
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


def _register_hook(model, mode):
    if mode == "torch-fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if mode == "torch-powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, peers.RANK, start_powerSGD_iter=_DENSE_STEPS
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _connect():
    """Connect to the other workers at the addresses of TensorFlow's workers."""
    config = json.loads(os.environ["TF_CONFIG"])
    addresses, rank = config["cluster"]["worker"], config["task"]["index"]
    local = addresses[0].startswith("127.")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if local else "eth0"
    distributed.init_process_group(
        "gloo", f"tcp://{addresses[0]}", rank=rank, world_size=len(addresses)
    )


def _time_steps(step, count):
    """Return the times of steps in ms."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - start))
    return times


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
