"""`examples/cluster`: contents of the files, and the workers that they start."""

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


def parse_tf_config(monkeypatch, text):
    """Check a `TF_CONFIG` as `tf_dgc` does, and return it."""
    monkeypatch.setenv("TF_CONFIG", text)
    tf_config.check_tf_config()
    return json.loads(text)


def test_compose(monkeypatch):
    compose = read("compose.yaml")
    services = compose["services"]
    addresses = [f"{name}:2222" for name in services]
    for rank, service in enumerate(services.values()):
        config = parse_tf_config(monkeypatch, service["environment"]["TF_CONFIG"])
        assert config["cluster"] == {"worker": addresses}
        assert config["task"] == {"type": "worker", "index": rank}
        context = FOLDER / service["build"]["context"]
        assert (context / service["build"]["dockerfile"]).samefile(
            FOLDER / "Dockerfile"
        )
        assert [v.split(":")[0] for v in service["volumes"]] == list(compose["volumes"])


def has_compose():
    if not shutil.which("docker"):
        return False
    command = ["docker", "compose", "version"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not has_compose(), reason="needs docker compose")
def test_docker_reads_compose_file():
    command = ["docker", "compose", "-f", FOLDER / "compose.yaml", "config", "--quiet"]
    subprocess.run(list(map(str, command)), check=True)


def test_dockerfile():
    text = (FOLDER / "Dockerfile").read_text()
    for source in re.findall(r"^COPY (\S+) ", text, re.M):
        assert (FOLDER.parents[1] / source).exists()


def test_dockerignore():
    """It excludes build outputs, and no file that pip or the image needs."""
    root = FOLDER.parents[1]
    patterns = [
        line.removeprefix("**/")
        for line in (root / ".dockerignore").read_text().splitlines()
        if line and line[0] not in "#!"
    ]

    def is_ignored(path):
        names = [path, *pathlib.PurePath(path).parts]
        return any(fnmatch.fnmatch(name, p) for name in names for p in patterns)

    needed = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"]
    needed += ["examples/cluster/train.py", "custom_ops/builder.py"]
    needed += ["tf_dgc/__init__.py", "custom_ops/cpu/parallel.cc"]
    assert [
        name for name in needed if is_ignored(name) or not (root / name).exists()
    ] == []
    ignored = [".git", ".venv", "build", "dist", "tests", "tf_dgc.egg-info"]
    ignored += ["custom_ops/build", "tf_dgc/_native", "tf_dgc/__pycache__"]
    assert [name for name in ignored if not is_ignored(name)] == []


def test_tfjob(monkeypatch):
    """Fields that kubeflow.org/v1 requires, and the `TF_CONFIG` of its operator."""
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
        config = {
            "cluster": {"worker": hosts},
            "task": {"type": "worker", "index": rank},
            "environment": "cloud",
        }
        parse_tf_config(monkeypatch, json.dumps(config))


def test_sbatch():
    path = FOLDER / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.M))
    assert (options["nodes"], options["ntasks-per-node"]) == ("4", "1")
    assert "srun --kill-on-bad-exit=1 --distribution=block" in text
    # Environment of the last task.
    environment = {
        "SLURM_PROCID": "3",
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "n[1-4]",
        "SLURM_STEP_TASKS_PER_NODE": f"{options['ntasks-per-node']}(x4)",
        "SLURM_DISTRIBUTION": "block",
    }
    assert len(slurm.config_of(environment)["cluster"]["worker"]) == 4


@pytest.mark.parametrize("name", ["Dockerfile", "slurm.sbatch"])
def test_files_have_the_allocator_settings(name):
    text = (FOLDER / name).read_text()
    assert all(f"{key}={value}" in text for key, value in ALLOCATOR_SETTINGS.items())


def test_flags_are_those_of_the_script():
    defined = re.findall(r"DEFINE_\w+\(\"(\w+)\"", TRAIN.read_text())
    replicas = read("tfjob.yaml")["spec"]["tfReplicaSpecs"]
    pod = replicas["Worker"]["template"]["spec"]
    words = [
        *pod["containers"][0]["args"],
        *(FOLDER / "slurm.sbatch").read_text().split(),
    ]
    flags = {w[2:] for w in words if re.fullmatch("--[a-z_]+", w)} - {"label"}
    assert flags == {"epochs", "directory"} <= {*defined}


@pytest.mark.slow
@pytest.mark.workers
def test_training_as_slurm_tasks(tmp_path):
    """All tasks run on this machine, with Slurm's variables."""
    assert "2 workers: accuracy" in run_tasks(tmp_path, epochs=2)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [e["epoch"] for e in record["epochs"]] == [0, 1]
    assert [e["steps"] for e in record["epochs"]] == [32, 64]
    assert record["workers"] == 2


@pytest.mark.slow
@pytest.mark.workers
def test_training_by_the_launcher_within_a_job(tmp_path):
    """From an interactive session, which has Slurm's variables."""
    session = {"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_JOB_ID": "1"}
    launcher = [sys.executable, "-m", "tf_dgc", "run", "--workers", "2", TRAIN]
    flags = ["--epochs=1", f"--directory={tmp_path}"]
    finished = programs.run(
        [*launcher, *flags],
        merged=True,
        **session,
        SLURM_STEP_TASKS_PER_NODE="1",
        CUDA_VISIBLE_DEVICES="-1",
    )
    assert finished.returncode == 0
    assert "2 workers: accuracy" in finished.stdout


def run_tasks(tmp_path, epochs):
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
                task = worker_processes.start_process(
                    command, environment, log.fileno()
                )
                tasks.append(task)
        codes = [task.wait(250) for task in tasks]
    finally:
        worker_processes.end_processes(tasks)
    output = paths[0].read_text(errors="replace")
    assert codes == [0, 0], output
    return output
