"""`examples/cluster`: what each file says, and what it would start."""

import fnmatch
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import programs
import pytest
import yaml

from tf_dgc.multiworker import slurm, tf_config
from tf_dgc.multiworker.launch import worker_processes
from tf_dgc.multiworker.launch.launcher import ALLOCATOR_SETTINGS

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "cluster"
TRAIN = FOLDER / "train.py"


def read(name):
    return yaml.safe_load((FOLDER / name).read_text())


def check_as_tensorflow(monkeypatch, text):
    """Hold it to what `tf_dgc` holds `TF_CONFIG` to, and return it."""
    monkeypatch.setenv("TF_CONFIG", text)
    tf_config.check_tf_config()
    return json.loads(text)


def test_compose(monkeypatch):
    found = read("compose.yaml")
    services = found["services"]
    addresses = [f"{name}:2222" for name in services]
    for rank, service in enumerate(services.values()):
        told = check_as_tensorflow(monkeypatch, service["environment"]["TF_CONFIG"])
        assert told["cluster"] == {"worker": addresses}
        assert told["task"] == {"type": "worker", "index": rank}
        context = FOLDER / service["build"]["context"]
        assert (context / service["build"]["dockerfile"]).samefile(
            FOLDER / "Dockerfile"
        )
        assert [v.split(":")[0] for v in service["volumes"]] == list(found["volumes"])


def has_compose():
    if not shutil.which("docker"):
        return False
    asked = ["docker", "compose", "version"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not has_compose(), reason="needs docker compose")
def test_compose_as_docker_reads_it():
    command = ["docker", "compose", "-f", FOLDER / "compose.yaml", "config", "--quiet"]
    subprocess.run(list(map(str, command)), check=True)


def test_dockerfile():
    text = (FOLDER / "Dockerfile").read_text()
    for source in re.findall(r"^COPY (\S+) ", text, re.M):
        assert (FOLDER.parents[1] / source).exists()


def test_what_is_left_out_of_the_image():
    """Nothing that pip or the image needs; and what a checkout has beside it."""
    root = FOLDER.parents[1]
    patterns = [
        line.removeprefix("**/")
        for line in (root / ".dockerignore").read_text().splitlines()
        if line and line[0] not in "#!"
    ]

    def left_out(path):
        places = [path, *pathlib.PurePath(path).parts]
        return any(fnmatch.fnmatch(place, p) for place in places for p in patterns)

    needed = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"]
    needed += ["examples/cluster/train.py", "custom_ops/builder.py"]
    needed += ["tf_dgc/__init__.py", "custom_ops/cpu/parallel.cc"]
    assert [
        name for name in needed if left_out(name) or not (root / name).exists()
    ] == []
    beside = [".git", ".venv", "build", "dist", "tests", "tf_dgc.egg-info"]
    beside += ["custom_ops/build", "tf_dgc/_native", "tf_dgc/__pycache__"]
    assert [name for name in beside if not left_out(name)] == []


def test_tfjob(monkeypatch):
    """The fields that kubeflow.org/v1 asks for, and what its operator sets."""
    job = read("tfjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "TFJob")
    assert job["spec"].keys() == {"runPolicy", "tfReplicaSpecs"}
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] in ("Running", "All", "None")
    (kind, replicas), *others = job["spec"]["tfReplicaSpecs"].items()
    assert kind == "Worker"
    assert not others
    assert replicas.keys() == {"replicas", "restartPolicy", "template"}
    policies = ("OnFailure", "Never", "Always", "ExitCode")
    assert replicas["restartPolicy"] in policies
    pod = replicas["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "tensorflow"
    (port,) = container["ports"]
    assert port == {"name": "tfjob-port", "containerPort": 2222}
    mounted = [m["name"] for m in container["volumeMounts"]]
    assert mounted == [v["name"] for v in pod["volumes"]]
    name, number = job["metadata"]["name"], replicas["replicas"]
    hosts = [f"{name}-worker-{i}.default.svc:2222" for i in range(number)]
    for rank in range(number):
        told = {
            "cluster": {"worker": hosts},
            "task": {"type": "worker", "index": rank},
            "environment": "cloud",
        }
        check_as_tensorflow(monkeypatch, json.dumps(told))


def test_sbatch():
    path = FOLDER / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.M))
    assert (options["nodes"], options["ntasks-per-node"]) == ("4", "1")
    assert "srun --kill-on-bad-exit=1 --distribution=block" in text
    # What Slurm tells the last of its tasks.
    told = {
        "SLURM_PROCID": "3",
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "n[1-4]",
        "SLURM_STEP_TASKS_PER_NODE": f"{options['ntasks-per-node']}(x4)",
        "SLURM_DISTRIBUTION": "block",
    }
    assert len(slurm.config_of(told)["cluster"]["worker"]) == 4


@pytest.mark.parametrize("name", ["Dockerfile", "slurm.sbatch"])
def test_memory_is_kept_between_steps(name):
    said = (FOLDER / name).read_text()
    assert all(f"{key}={value}" in said for key, value in ALLOCATOR_SETTINGS.items())


def test_flags_are_those_of_the_script():
    known = re.findall(r"DEFINE_\w+\(\"(\w+)\"", TRAIN.read_text())
    given = read("tfjob.yaml")["spec"]["tfReplicaSpecs"]["Worker"]["template"]["spec"]
    said = [
        *given["containers"][0]["args"],
        *(FOLDER / "slurm.sbatch").read_text().split(),
    ]
    flags = {a[2:] for a in said if re.fullmatch("--[a-z_]+", a)} - {"label"}
    assert flags == {"epochs", "directory"} <= {*known}


@pytest.mark.slow
@pytest.mark.workers
def test_training_as_slurm_starts_it(tmp_path):
    """Tasks with Slurm's variables, all on this machine."""
    assert "2 workers: accuracy" in step(tmp_path, epochs=2)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [e["epoch"] for e in record["epochs"]] == [0, 1]
    assert [e["steps"] for e in record["epochs"]] == [32, 64]
    assert record["workers"] == 2


@pytest.mark.slow
@pytest.mark.workers
def test_training_by_the_launcher_within_a_job(tmp_path):
    """As its docstring says, from an interactive session: it has Slurm's variables."""
    session = {"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_JOB_ID": "1"}
    launcher = [sys.executable, "-m", "tf_dgc", "run", "--workers", "2", TRAIN]
    flags = ["--epochs=1", f"--directory={tmp_path}"]
    ended = programs.run(
        [*launcher, *flags],
        merged=True,
        **session,
        SLURM_STEP_TASKS_PER_NODE="1",
        CUDA_VISIBLE_DEVICES="-1",
    )
    assert ended.returncode == 0
    assert "2 workers: accuracy" in ended.stdout


def step(tmp_path, epochs):
    shared = {
        "SLURM_JOB_ID": str(os.getpid() + epochs),
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    flags = [f"--directory={tmp_path / 'run'}", f"--epochs={epochs}"]
    command = [sys.executable, str(TRAIN), *flags]
    paths = [tmp_path / f"{rank}.log" for rank in range(2)]
    tasks = []
    try:
        for rank, path in enumerate(paths):
            environment = {**os.environ, **shared, "SLURM_PROCID": str(rank)}
            environment.pop("TF_CONFIG", None)
            with path.open("wb") as log:
                start = command, environment, log.fileno()
                tasks.append(worker_processes.start_process(*start))
        codes = [task.wait(250) for task in tasks]
    finally:
        worker_processes.end_processes(tasks)
    output = paths[0].read_text(errors="replace")
    assert codes == [0, 0], output
    return output
