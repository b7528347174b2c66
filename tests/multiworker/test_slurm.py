"""`tf_dgc.cluster.from_slurm`: the cluster from Slurm's variables."""

import json
import os

import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc.multiworker import slurm, tf_config

# Variables of `srun --nodes=3 --ntasks=5` on the second node.
VARIABLES = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[08-10]",
    "SLURM_JOB_NODELIST": "node[08-11]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_TASKS_PER_NODE": "2(x4)",
    "SLURM_DISTRIBUTION": "block",
}


@pytest.fixture
def _step(monkeypatch):
    for name in [n for n in os.environ if n.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TF_CONFIG", "")


@pytest.mark.usefixtures("_step")
def test_tensorflow_reads_the_config():
    config = tf_dgc.cluster.from_slurm(port=4000)
    assert json.loads(os.environ["TF_CONFIG"]) == config
    tf_config.check_tf_config()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("worker", 3)
    assert resolver.cluster_spec().as_dict() == {
        "worker": [
            *("node08:4000", "node08:4001", "node09:4000", "node09:4001"),
            "node10:4000",
        ]
    }
    assert tf_dgc.cluster.from_slurm(port=4000) == config  # may be called twice
    with pytest.raises(ValueError, match="TF_CONFIG, which already has"):
        tf_dgc.cluster.from_slurm(port=4001)


def test_ports_follow_from_the_job():
    first, other = (
        slurm.config_of({**VARIABLES, "SLURM_JOB_ID": job})["cluster"]["worker"]
        for job in ("1234567", "1234569")
    )
    assert first[:2] == ["node08:19567", "node08:19568"]
    assert not {*first} & {*other}


def test_cyclic_distribution():
    config = slurm.config_of({**VARIABLES, "SLURM_DISTRIBUTION": "cyclic:block"}, 1)
    assert config["cluster"]["worker"] == [
        *("node08:1", "node09:1", "node10:1"),
        *("node08:2", "node09:2"),
    ]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a,b.c-d", ["a", "b.c-d"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[098-101,7],m", ["n098", "n099", "n100", "n101", "n7", "m"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("gpu[1,3]-ib", ["gpu1-ib", "gpu3-ib"]),
    ],
)
def test_node_lists(text, names):
    assert slurm.hosts(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n[a]", "a,,b", "n]"])
def test_bad_node_lists_are_refused(text):
    with pytest.raises(ValueError, match="A node list must have Slurm's form"):
        slurm.hosts(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_PROCID": ""}, "SLURM_PROCID is not set"),
        (
            {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""},
            "SLURM_STEP_NODELIST is not set",
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, "a number of tasks for each node"),
        ({"SLURM_DISTRIBUTION": "plane=2"}, "by block or cyclically"),
    ],
)
def test_bad_variables_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        slurm.config_of({**VARIABLES, **changes})
