"""Python blocks of the documentation and examples of docstrings run.

Blocks of a page run one after another and share names. Besides, they may use those of
the fixture `names`: a small model, data and an optimizer. A block that does not run has
the reason in the line before it, `<!-- not run: REASON -->`. The tutorial has its own
test.
"""

import configparser
import doctest
import functools
import importlib
import json
import pathlib
import re
import types

import keras
import numpy as np
import pages
import pytest
import tensorflow as tf
from serving import ServerGroup

import tf_dgc

pytestmark = [
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning"),
    pytest.mark.filterwarnings("ignore:tf_dgc. there is one worker:UserWarning"),
]
TUTORIAL = "docs/tutorial.md"
SERVER = {"docs/research/server.md", "docs/slow_links.md"}
SLOW = SERVER | {"docs/will_it_help.md"}
READERS = {
    "bash": str,  # tests/project/test_commands.py
    "ini": lambda text: configparser.ConfigParser().read_string(text),
    "json": json.loads,
    "python": lambda text: compile(text, "block", "exec"),
    "text": str,  # output of a program
}


def build_model():
    layers = [keras.layers.Dense(40, activation="relu"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((40,)), *layers])


@pytest.fixture
def names():
    """Return names that blocks may use without defining them."""
    random = np.random.default_rng(0)
    x = random.normal(size=(16, 40)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, np.eye(16, 3, dtype="float32")))
    model = build_model()
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(tf_dgc.DGCOptimizer(sgd), loss)
    return {
        "build_model": build_model,
        "dataset": dataset.batch(8),
        "epochs": 2,
        "keras": keras,
        "loss": loss,
        "model": model,
        "sgd": sgd,
        "steps_per_epoch": 2,
        "tf": tf,
        "tf_dgc": tf_dgc,
    }


def test_every_block_is_valid():
    blocks = [block for page in pages.PAGES for block in pages.blocks(page)]
    fences = [
        pages.name(page)
        for page in pages.PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.lstrip().startswith("```")
    ]
    assert len(blocks) > 60
    assert fences == [pages.name(block.page) for block in blocks for _ in range(2)]
    unknown = [b.place for b in blocks if b.language not in READERS and not b.reason]
    assert unknown == []
    for block in blocks:
        READERS.get(block.language, str)(block.text)


def parameter(page):
    marks = [pytest.mark.slow] if pages.name(page) in SLOW else []
    return pytest.param(page, id=pages.name(page), marks=marks)


PAGES = [
    parameter(page)
    for page in pages.with_blocks("python")
    if pages.name(page) != TUTORIAL
]


@pytest.mark.parametrize("page", PAGES)
def test_python(page, names, monkeypatch, tmp_path, request):
    monkeypatch.chdir(tmp_path)
    if pages.name(page) in SERVER:
        request.getfixturevalue("server")
    for block in pages.blocks(page, "python"):
        code = block.compiled()
        if not block.reason:
            exec(code, names)


@pytest.fixture
def server(monkeypatch, names):
    """Start a server with this process as its only worker."""
    with ServerGroup(1) as served:
        cluster = {"ps": [served.servers[0].address], "worker": ["127.0.0.1:1"]}
        task = {"type": "worker", "index": 0}
        config = {"cluster": cluster, "task": task}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        yield
        names["model"].optimizer.leave()


# Examples in docstrings that do not run here, with the reason; and that need a server.
NOT_RUN = {
    "tf_dgc.multiworker.slurm.from_slurm": "needs `srun`: test_cluster_examples.py"
}
WITH_A_SERVER = {"tf_dgc.server.optimizer.ServerOptimizer"}
PACKAGE = pathlib.Path(tf_dgc.__file__).parent
PROMPTS = {  # by module
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): number
    for path in sorted(PACKAGE.rglob("*.py"))
    if (number := len(re.findall(r"^ *>>> ", path.read_text(), re.M)))
}


def examples():
    """Return the examples of the package's docstrings, by object name."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [importlib.import_module(m.removesuffix(".__init__")) for m in PROMPTS]
    doctests = [d for module in modules for d in finder.find(module) if d.examples]
    return {d.name: d for d in doctests}


EXAMPLES = examples()


class OutputChecker(doctest.OutputChecker):
    """Compares the output only if the docstring shows one."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


def test_every_prompt_belongs_to_an_example():
    assert {*NOT_RUN} | WITH_A_SERVER <= {*EXAMPLES}
    count = sum(len(example.examples) for example in EXAMPLES.values())
    assert count == sum(PROMPTS.values()) > 30


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] if n in WITH_A_SERVER else [])
        for n in sorted({*EXAMPLES} - {*NOT_RUN})
    ],
)
def test_example(name, names, monkeypatch, tmp_path, request):
    """An example may use the names of its module, and those of the fixture `names`."""
    monkeypatch.chdir(tmp_path)
    if name in WITH_A_SERVER:
        request.getfixturevalue("server")
    example = EXAMPLES[name]
    example.globs = {**example.globs, **names, **example_names(names)}
    doctest.DebugRunner(OutputChecker()).run(example, clear_globs=False)


def example_names(names):
    """Return names that only examples in docstrings use."""
    model, sgd = names["model"], names["sgd"]
    x, y = np.ones((16, 40), "float32"), np.ones((16, 3), "float32")
    optimizers = {f"{side}_optimizer": tf_dgc.DGCOptimizer(sgd) for side in "gd"}
    for optimizer in optimizers.values():
        optimizer.build(model.trainable_variables)
    local = tf_dgc.LocalOptimizer(sgd, 2)
    local.build(model.trainable_variables)
    return {
        "CompressionMonitor": tf_dgc.callbacks.CompressionMonitor,
        "DGCOptimizer": tf_dgc.DGCOptimizer,
        "TensorBoard": keras.callbacks.TensorBoard,
        "gan": types.SimpleNamespace(
            fit=functools.partial(model.fit, y=y), **optimizers
        ),
        "gradients": np.ones((4, 100, 100), "float32"),
        "optimizer": local,
        "strategy": tf.distribute.get_strategy(),
        "x": x,
        "y": y,
    }
