"""Packets per step in `fit`, against a loop over `strategy.run`.

    python benchmarks/packets.py --json packets.json

Two workers, one after the other in the same processes: a custom loop with an infinite
and a finite data set, and `fit` with both and 1 and 10 steps per execution. They have a
loopback interface of their own (root is needed for that), whose packets the kernel
counts.
"""

import json
import os
import pathlib
import subprocess
import sys

import keras
import tensorflow as tf
from absl import app, flags

_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")
_WORKER = pathlib.Path(__file__).parent / "workers/packet_worker.py"


def main(_):
    """Run two workers, and print the rows."""
    command = [sys.executable, "-m", "tf_dgc", "run", "--workers=2", str(_WORKER)]
    steps = 'mount -t sysfs sysfs /sys && ip link set lo up && exec "$@"'
    namespace = ["unshare", "--net", "--mount", "sh", "-c", steps, "sh"]
    output = subprocess.run(
        [*namespace, *command],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    ).stdout
    line = next(line for line in output.splitlines() if "ROWS " in line)
    rows = json.loads(line.partition("ROWS ")[2])
    custom = rows[0]["packets_per_step"]
    print(f"TensorFlow {tf.__version__}, Keras {keras.__version__}")
    for row in rows:
        row["ratio_to_custom"] = row["packets_per_step"] / custom
        print(
            row["loop"],
            row["dataset"],
            row["steps_per_execution"],
            f"{row['packets_per_step']:.2f} packets per step,",
            f"{row['ratio_to_custom']:.3f} of the custom loop's",
        )
    if _JSON.value:
        versions = {"tensorflow": tf.__version__, "keras": keras.__version__}
        pathlib.Path(_JSON.value).write_text(
            json.dumps([{**versions, **row} for row in rows], indent=1)
        )


if __name__ == "__main__":
    app.run(main)
