"""`tf_dgc.advise`: timing leaves the model unchanged; each method gets a row."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time

import keras
import numpy as np
import programs
import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc.advice import (
    advise,
    known_accuracy,
    machine_load,
    prediction,
    timing,
)
from tf_dgc.cli import advise as command
from tf_dgc.cli import main
from tf_dgc.optimizers import autotune

QUICK = {"batch_size": 2, "seconds": 0.1}


def make_model():
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(50, 40)(inputs)
    x = keras.layers.BatchNormalization()(keras.layers.Flatten()(x))
    return keras.Model(inputs, keras.layers.Dense(8)(x), name="small")


@pytest.mark.parametrize(
    "methods", [["dgc"], pytest.param(timing.DEFAULT, marks=pytest.mark.slow)]
)
def test_rows_and_sentences(methods):
    model = make_model()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    before = [np.array(v) for v in model.variables]
    advice = tf_dgc.advise(model, num_workers=[4, 2], methods=methods, **QUICK)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    assert not model.optimizer.built
    rows = advice.rows()
    names = ["dense", *(m for m in methods if m != "dense")]
    assert [(r["workers"], r["method"]) for r in rows] == [
        (number, name) for number in (2, 4) for name in names
    ]
    assert [r["advised"] for r in rows].count(True) == 2
    weights = 4 * sum(v.shape.num_elements() for v in model.trainable_variables)
    assert rows[0]["sent_bytes"] == weights
    for row in rows:
        assert row["step_ms"] > row["alone_ms"] > 0
        low, high = row["step_ms_interval"]
        assert 0 < low <= row["step_ms"] <= high
        assert row["examples_per_second"] == pytest.approx(
            2 * row["workers"] / row["step_ms"] * 1000
        )
    assert [s[:10] for s in advice.sentences()[:2]] == ["2 workers:", "4 workers:"]
    assert json.loads(json.dumps(advice.record()))["rows"] == rows


def test_compression_is_advised_on_slow_links_only():
    arguments = {"methods": ["float16"], "num_workers": 2, **QUICK}
    slow = tf_dgc.advise(make_model(), bandwidth="10kbit", latency=0, **arguments)
    assert slow.best(2).name == "float16"
    sentence = slow.sentences()[0]
    assert 'tf_dgc.CompressedOptimizer(optimizer, "float16")' in sentence
    dense, half = (p.timing for p in slow.predictions[2])
    links = tf_dgc.collectives.LinkSpeeds(1e-9, 1e-9, 1e-15)
    timings = [dense, half._replace(seconds=dense.seconds)]
    predictions = {2: [prediction.predict_step(t, 2, links) for t in timings]}
    unknown = "faster links cannot be predicted"
    fast = dataclasses.replace(slow, predictions=predictions, links=links, slowdown=1.0)
    for turning_point, text in (
        (0.0, "at any bandwidth."),
        (2e8, "from 200 Mbit/s on."),
        (math.inf, f"at no bandwidth up to 3.5 Gbit/s; {unknown}."),
    ):
        advice = dataclasses.replace(fast, turning_points={2: turning_point})
        assert advice.sentences() == [
            "2 workers: do not compress. No method is more than 5 % faster. "
            f"Dense is advised {text}"
        ]


def test_noise_and_load_are_reported():
    timings = [
        timing.StepTiming(c, seconds, lambda _: [], interval=interval)
        for c, seconds, interval in zip(
            timing.find_candidates("float16"),
            (1.0, 0.8),
            ((1, 1), (0.75, 1.5)),
            strict=True,
        )
    ]
    links = tf_dgc.collectives.LinkSpeeds(1e-9, 1e-9, 1e-15)
    advice = advise.Advice(
        "small",
        2,
        {2: [prediction.predict_step(t, 2, links) for t in timings]},
        links,
        0.0,
        {2: 0.0},
        1e9,
        slowdown=1.5,
        kind_of_model="convolutional",
    )
    assert advice.best(2).name == "dense"
    first, last = advice.sentences()
    assert first.startswith(
        "2 workers: change nothing. The timings are too noisy to tell: float16 is 1.2 "
        "(0.8 to 1.7) times as fast as dense. Repeat this on an idle machine"
    )
    assert last.startswith("Other processes slowed the timed steps 1.5 times;")
    narrow = [timings[0], timings[1]._replace(interval=(0.9, 1.1))]
    predictions = {2: [prediction.predict_step(t, 2, links) for t in narrow]}
    certain = dataclasses.replace(advice, predictions=predictions, slowdown=1.0)
    assert certain.best(2).name == "float16"
    first, last = certain.sentences()
    assert "float16, 1.2 (1.1 to 1.4) times as fast as dense;" in first
    assert last.startswith("float16: 0.5 points less accurate than dense in one run")


@pytest.mark.parametrize(
    ("layer", "shape", "kind"),
    [
        (keras.layers.Conv2D(2, 1), (4, 4, 1), "convolutional"),
        (keras.layers.Embedding(5, 2), (4,), "language"),
        (keras.layers.Dense(2), (4,), "other"),
    ],
)
def test_kind_of_model(layer, shape, kind):
    inputs = keras.Input(shape)
    assert advise.kind_of_model(keras.Model(inputs, layer(inputs))) == kind


def test_known_accuracy():
    sentence = known_accuracy.accuracy_sentence
    assert sentence("dense", "language") == ""
    assert sentence("power_sgd", "convolutional").startswith("power_sgd: 0.3 points")
    assert "nothing is known" in sentence("local_sgd 16", "language")
    for name, kind in known_accuracy._LOSSES:
        assert name in timing.DEFAULT
        assert sentence(name, kind)


def test_median_with_interval():
    """The interval contains the median of the distribution in about 95 % of draws."""
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        median, (low, high) = timing.median_with_interval(random.lognormal(size=40))
        hits += low * median <= 1 <= high * median
    assert 0.92 < hits / 400 < 0.99
    assert timing.median_with_interval([2.0] * 5) == (2.0, (1.0, 1.0))
    assert timing.median_with_interval([1, 2, 4]) == (2, (0.5, 2.0))


def test_load_of_other_processes():
    """A process that competes for the only processor allowed doubles the time."""
    code = "import time; end = time.time() + 3\nwhile time.time() < end: pass"
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        other = subprocess.Popen([sys.executable, "-c", code])
        try:
            time.sleep(0.5)
            load, end = machine_load.Load(), time.perf_counter() + 1.0
            while time.perf_counter() < end:
                pass
            assert load.slowdown() > 1.5
        finally:
            other.kill()
            other.wait()
    finally:
        os.sched_setaffinity(0, processors)


def test_subclassed_model_needs_data():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(4)

        def call(self, x):
            return self.dense(x)

    model = Subclassed()
    model(tf.ones([2, 3]))
    sgd = keras.optimizers.SGD(0.1)
    model.compile(tf_dgc.DGCOptimizer(sgd), "mse")
    arguments = {"num_workers": 1, "methods": ["dgc 0.9"], **QUICK}
    with pytest.raises(ValueError, match="pass a batch of yours as `data`"):
        tf_dgc.advise(model, **arguments)
    advice = tf_dgc.advise(model, data=tf.ones([2, 3]), **arguments)
    assert [r["method"] for r in advice.rows()] == ["dense", "dgc 0.9"]
    assert not any("workers:" in sentence for sentence in advice.sentences())


def test_user_optimizer_is_unwrapped():
    sgd = keras.optimizers.SGD(0.25, gradient_accumulation_steps=2)
    scaled = keras.optimizers.LossScaleOptimizer
    for optimizer in (
        scaled(tf_dgc.DGCOptimizer(sgd)),
        scaled(sgd),
        tf_dgc.LocalOptimizer(sgd, 4),
        sgd,
    ):
        model = make_model()
        model.compile(optimizer, "mse")
        inner = advise._inner_optimizer(model)
        assert type(inner) is keras.optimizers.SGD
        assert float(inner.learning_rate) == 0.25
        assert inner.gradient_accumulation_steps is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": ["zip"]}, r"`methods` must be of .*Received: 'zip'"),
        ({"methods": ["dgc much"]}, r"Received: 'dgc much'"),
        ({"methods": ["local_sgd 0"]}, r"Received: 'local_sgd 0'"),
        (
            {"methods": ["dgc 2"]},
            r"'dgc 2' is not possible: `sparsity` must be a number in",
        ),
        ({"num_workers": 0}, "`num_workers` must be a whole number"),
        ({"batch_size": 0.5}, "`batch_size` must be a whole number"),
        ({"bandwidth": "fast"}, "`bandwidth` must be above 0"),
        ({"bandwidth": None}, "`bandwidth` must be above 0"),
        ({"latency": -1}, "`latency` must be 0 or more"),
        ({"latency": None}, "`latency` must be 0 or more"),
        ({"seconds": -1}, "`seconds` must be above 0"),
        ({"methods": "zip"}, r"Received: 'zip'"),
    ],
)
def test_wrong_arguments_raise_before_timing(arguments, message, monkeypatch):
    monkeypatch.setattr(advise.timing, "time_steps", pytest.fail)
    with pytest.raises(ValueError, match=message):
        tf_dgc.advise(make_model(), **arguments)


def test_create_batch():
    ids = advise.create_batch(make_model(), 3)
    assert ids.shape == (3, 6)
    assert ids.dtype == tf.int32
    assert 10 < tf.reduce_max(ids) < 50
    image = keras.Input((4, 4, 3), dtype="float16", name="a")
    pair = keras.Model({"a": image, "b": keras.Input((2,), name="b")}, image)
    batch = advise.create_batch(pair, 5)
    assert {k: (v.shape.as_list(), v.dtype.name) for k, v in batch.items()} == {
        "a": ([5, 4, 4, 3], "float16"),
        "b": ([5, 2], "float32"),
    }
    text = keras.Input((None,), dtype="int32", name="text")
    with pytest.raises(ValueError, match=r"'text' has axes of any length.*--length N"):
        advise.create_batch(keras.Model(text, text), 2)
    assert advise.create_batch(keras.Model(text, text), 2, 7).shape == (2, 7)
    with pytest.raises(ValueError, match="`length` must be a whole number"):
        advise.create_batch(keras.Model(text, text), 2, 0)


def make_text_model():
    vectorize = keras.layers.TextVectorization(vocabulary=["and", "or", "not"])
    texts = keras.Input((1,), dtype="string")
    x = keras.layers.Embedding(5, 300)(vectorize(texts))
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(texts, keras.layers.Dense(1)(x), name="texts")


def test_text_models():
    model = make_text_model()
    texts = advise.create_batch(model, 3, 9).numpy()
    assert texts.shape == (3, 1)
    words = [text.decode().split() for text in texts[:, 0]]
    assert [len(text) for text in words] == [9, 9, 9]
    assert {word for text in words for word in text} == {"and", "or", "not"}
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
    pair = keras.Input((2,), dtype="string")
    batch = advise.create_batch(keras.Model(pair, lookup(pair)), 50).numpy()
    assert set(batch.ravel()) == {b"a", b"b"}
    advice = tf_dgc.advise(model, num_workers=2, methods="dgc 0.9", **QUICK)
    assert len(advice.rows()) == 2


def test_one_of_several_workers_can_call_it_alone(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", CLUSTER)
    assert tf_dgc.advise(make_model(), num_workers=2, methods="dgc", **QUICK).rows()


def test_command_line(tmp_path, capsys):
    path, rows = tmp_path / "model.keras", tmp_path / "rows.json"
    make_model().save(path)
    arguments = [str(path), "--workers=2,3", "--methods=float16", f"--json={rows}"]
    arguments += ["--batch-size=2", "--seconds=0.1"]
    arguments += [f"--html={tmp_path / 'page.html'}"]
    assert main.main(["advise", *arguments]) == 0
    output = capsys.readouterr().out
    assert output.startswith("small, batches of 2 for each worker:")
    assert "2 workers: " in output
    record = json.loads(rows.read_text())
    assert [(r["workers"], r["method"]) for r in record["rows"]] == [
        (n, m) for n in (2, 3) for m in ("dense", "float16")
    ]
    assert [text for text in record["advice"] if text not in output] == []
    assert record["turning_points"].keys() == {"2", "3"}
    assert record["links"]["round_trip"] == 2e-4

    page = (tmp_path / "page.html").read_text()
    assert page.count('class="bars"') == page.count("<svg") == 2  # numbers of workers
    for text in ("small, batches of 2", "bandwidth (3 workers)", "per_byte"):
        assert text in page
    assert page.count("<tr class=marked>") == 2


def test_progress_bar(capsys):
    for done in (1, 2):
        command._show_progress(done, 2)
    assert capsys.readouterr().err == (
        "\rtiming methods [=.] 1/2\rtiming methods [==] 2/2\n"
    )


def test_measured_links(strategies, monkeypatch):
    """Links and steps are measured by all workers; the slowest result counts."""
    shared, share_slowest = [], autotune.share_slowest

    def share_doubled(numbers):
        shared.append(numbers)
        return (yield from share_slowest([2 * number for number in numbers]))

    monkeypatch.setattr(autotune, "share_slowest", share_doubled)
    arguments = {"methods": ["float16"], **QUICK}
    advice = tf_dgc.advise(make_model(), strategy=strategies[2], **arguments)
    assert advice.predictions.keys() == {2}
    assert advice.turning_points.keys() == {2}
    assert "Dense is advised " in advice.sentences()[0]
    assert advice.links.per_byte > 0
    assert list(advice.links[3:6]) == [2 * number for number in shared[0][4:]]
    alone = [p.timing.seconds for p in advice.predictions[2]]
    assert alone == [2 * number for number in shared[-1]]
    with pytest.raises(ValueError, match=r"`strategy` must have two or more workers"):
        tf_dgc.advise(make_model(), strategy=strategies[1], **arguments)


@pytest.mark.slow
@pytest.mark.workers
def test_workers_measure_their_links(tmp_path):
    path, rows = tmp_path / "model.keras", tmp_path / "rows.json"
    model = make_model()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.save(path)
    command = [sys.executable, "-m", "tf_dgc", "run", "--workers", "2", "-m", "tf_dgc"]
    command += ["advise", path, "--measure", "--methods=float16", f"--json={rows}"]
    finished = programs.run([*command, "--batch-size=2", "--seconds=0.2"], merged=True)
    assert finished.returncode == 0, finished.stdout
    assert finished.stdout.count("small, batches of 2 for each worker:") == 1
    records = json.loads(rows.read_text())["rows"]
    assert [(r["workers"], r["method"]) for r in records] == [
        (2, "dense"),
        (2, "float16"),
    ]
    assert all(r["step_ms"] > r["alone_ms"] for r in records)


MODULE = """
import keras

@keras.saving.register_keras_serializable()
class CustomDense(keras.layers.Dense):
    pass

def build():
    inputs = keras.Input((None, 4))
    return keras.Model(inputs, CustomDense(3)(inputs), name="custom")

def number():
    return 1

def needs(width):
    return build()

def fails():
    return {}["width"]

WIDTH = 3
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Change to a directory with modules that is not in `sys.path`."""
    (tmp_path / "custom_models.py").write_text(MODULE)
    (tmp_path / "broken_models.py").write_text("import nosuchpackage")
    monkeypatch.chdir(tmp_path)
    paths = [path for path in sys.path if path not in ("", str(tmp_path))]
    monkeypatch.setattr(sys, "path", paths)
    yield
    keras.saving.get_custom_objects().pop("Custom>CustomDense", None)
    for name in ("custom_models", "broken_models"):
        sys.modules.pop(name, None)


QUICK_FLAGS = ["--workers=2", "--methods=float16", "--batch-size=2", "--seconds=0.1"]


@pytest.mark.parametrize(
    "model", [["custom_models.build"], ["--model", "custom_models.build"]]
)
def test_function_in_the_current_directory(directory, model, capsys):
    assert main.main(["advise", *model, "--length=5", *QUICK_FLAGS]) == 0
    assert capsys.readouterr().out.startswith("custom, batches of 2")


def test_file_with_a_custom_layer_needs_import(directory, capsys):
    module = {"__name__": "custom_models"}
    exec(MODULE, module)
    module["build"]().save("custom.keras")
    keras.saving.get_custom_objects().pop("Custom>CustomDense")
    arguments = ["advise", "custom.keras", "--length=5", *QUICK_FLAGS]
    with pytest.raises(SystemExit, match=r"cannot be loaded.*--import"):
        main.main(arguments)
    with pytest.raises(SystemExit, match=r"no module of that name.*nothing_there"):
        main.main([*arguments, "--import", "nothing_there"])
    assert main.main([*arguments, "--import", "custom_models"]) == 0
    assert capsys.readouterr().out.startswith("custom, batches of 2")


CLUSTER = json.dumps(
    {
        "cluster": {"worker": ["localhost:1", "localhost:2"]},
        "task": {"type": "worker", "index": 0},
    }
)


def test_several_workers_without_measure_raise(monkeypatch, capsys):
    """All workers would time their steps at once."""
    monkeypatch.setenv("TF_CONFIG", CLUSTER)
    with pytest.raises(SystemExit, match=r"names 2 workers\. Pass --measure"):
        main.main(["advise", "keras.applications.MobileNetV3Small"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one model"),
        (["a.keras", "--model=b.keras"], "give one model"),
        (
            ["a.keras", "--measure", "--bandwidth=1gbit"],
            "--measure replaces --bandwidth",
        ),
        (["a.keras", "--seconds=-1"], "must be a number above 0"),
        (["a.keras", "--seconds=soon"], "must be a number above 0"),
    ],
)
def test_wrong_options_raise(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main.main(["advise", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "broken_models.build",
            "broken_models cannot be imported: No module named 'nos",
        ),
        ("custom_models.nothing", "name of a function"),
        ("custom_models.number", "custom_models.number must return a keras.Model"),
        (
            "custom_models.needs",
            "needs must return a keras.Model without arguments: missing",
        ),
        ("custom_models.fails", "custom_models.fails raised KeyError: 'width'"),
        ("custom_models.WIDTH", "custom_models.WIDTH must be a function. Received: 3"),
        ("no_models.build", "name of a function"),
    ],
)
def test_module_without_a_model_raises(directory, model, message):
    with pytest.raises(SystemExit, match=message):
        main.main(["advise", model])


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_unwritable_file_raises(directory, option, monkeypatch, tmp_path):
    """It raises before anything is timed and leaves no other output file."""
    monkeypatch.setattr(advise.timing, "time_steps", pytest.fail)
    files = ["--json=fine.json", "--html=fine.html", f"{option}=none/file"]
    with pytest.raises(SystemExit, match="No such file or directory: 'none/file'"):
        main.main(["advise", "custom_models.build", "--length=5", *files, *QUICK_FLAGS])
    assert not list(tmp_path.glob("fine.*"))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("keras.applications.NoNet", "name of a function"),
        ("plain", "name of a function"),
    ],
)
def test_unknown_model_raises(model, message):
    with pytest.raises(SystemExit, match=message):
        main.main(["advise", model])
