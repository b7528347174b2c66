"""`tf-dgc report`: a self-contained page of records or TensorBoard logs."""

import dataclasses
import html.parser
import pathlib
import re
import xml.etree.ElementTree

import keras
import numpy as np
import pytest

import tf_dgc
from tf_dgc.cli import main
from tf_dgc.reports import page, record, run_page
from tf_dgc.reports.record import EpochRecord, RunRecord, VariableRecord

ROOT = "<script>alert(1)</script> $a$ & b"
VOID = {"meta", "br", "link"}


class Page(html.parser.HTMLParser):
    """Parses a page into texts, tags and links; checks that all tags are closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.links = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href") and v[0] != "#"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


def make_run(epochs=3, name="net"):
    epoch_records = [
        EpochRecord(
            i,
            {
                "loss": 1 / (i + 1),
                "val_loss": None,
                "accuracy": 0.5,
                "compression_ratio": 90.0,
                "total_compression_ratio": 80.0,
                "staleness_mean": 3.0,
                "staleness_p99": 9.0,
                "staleness_max": 11.0,
            },
            10 * (i + 1),
            1000 * (i + 1),
            90_000 * (i + 1),
            seconds=2.5 * (i + 1),
        )
        for i in range(epochs)
    ]
    variables = [
        VariableRecord(
            f"{ROOT}_{i}/kernel", "", (100, 10), 4000, None if i == 3 else 50
        )
        for i in range(45)
    ]
    method = {"name": "DGC", "collective": "ring", "settings": {"note": ROOT}}
    return RunRecord(name, 2, {"tf_dgc": "1"}, {"": method}, variables, epoch_records)


def test_page_of_one_run():
    result = Page(run_page.run_page({"run": make_run(name=ROOT)}))
    assert result.links == []  # except within the page
    assert "script" not in result.tags
    assert f"Training of {ROOT}" in result.texts
    heads = [t for t in result.texts if t in ("loss", "accuracy", "Ratio", "Staleness")]
    assert [h for i, h in enumerate(heads) if h not in heads[:i]] == [
        "loss",
        "accuracy",
        "Ratio",
        "Staleness",
    ]
    assert result.tags.count("figure") == 5
    assert result.tags.count("svg") == 3 + 3 + 1 + 1  # panels; bars are no SVG
    for text in ("5 others", "270 kB", "7.5 s", "90", "bytes that a worker sent"):
        assert text in result.texts, text
    assert "nan" not in result.texts


def test_pages_are_the_same_each_time():
    runs = {"a": make_run(), "b": make_run(2)}
    text = run_page.run_page(runs)
    assert text == run_page.run_page(runs)
    ids = [
        element.attrib["id"]
        for part in text.split("<svg")[1:]
        for element in xml.etree.ElementTree.fromstring(
            "<svg" + part[: part.index("</svg>") + 6]
        ).iter()
        if "id" in element.attrib and element.attrib["id"].startswith(("p", "m"))
    ]
    clips = [i for i in ids if len(i) == 11]
    assert len(clips) == len(set(clips)) > 10


def test_runs_with_missing_fields():
    bare = [EpochRecord(i, {"loss": 1.0}, seconds=1.0 + i) for i in range(2)]
    unknown = {"variables": [], "versions": {}, "methods": {}, "workers": None}
    run = dataclasses.replace(make_run(), epochs=bare, **unknown)
    result = Page(run_page.run_page({"bare": run, "whole": make_run()}))
    assert "steps" in result.texts
    one_epoch = [EpochRecord(0, {"loss": 1.0})]
    run = dataclasses.replace(make_run(), epochs=one_epoch, variables=[])
    result = Page(run_page.run_page({"": run}))
    assert "epoch" in result.texts
    with pytest.raises(ValueError, match=r"at least one epoch\. Received: none"):
        run_page.run_page({"none": make_run(0)})


def test_tensorboard(tmp_path):
    layers = [keras.Input((40,)), keras.layers.Dense(60)]
    model = keras.Sequential(layers)
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    x, y = np.ones((32, 40), "float32"), np.ones((32, 60), "float32")
    model.compile(tf_dgc.CompressedOptimizer(sgd, "none"), "mse")
    callbacks = [
        tf_dgc.callbacks.CompressionMonitor(),
        keras.callbacks.TensorBoard(tmp_path / "logs", update_freq=1),
    ]
    history = model.fit(
        x,
        y,
        batch_size=16,
        epochs=3,
        verbose=0,
        callbacks=callbacks,
        validation_data=(x, y),
    ).history
    run = record.read_logdir(tmp_path / "logs")
    assert run.model == "logs"
    for key in ("loss", "val_loss", "bytes_per_step"):
        values = [e.logs[key] for e in run.epochs]
        np.testing.assert_allclose(values, history[key], rtol=1e-6)
    assert [e.steps for e in run.epochs] == [2, 4, 6]
    stats = model.optimizer.stats
    assert [e.sent_bytes for e in run.epochs] == [
        stats.bytes // 3 * i for i in (1, 2, 3)
    ]
    assert run.epochs[-1].dense_bytes == stats.dense_bytes
    seconds = [e.seconds for e in run.epochs]
    assert 0 < seconds[0] < seconds[1] < seconds[2] < 100
    out = tmp_path / "page.html"
    assert main.main(["report", str(tmp_path / "logs"), "--out", str(out)]) == 0
    assert "Training of logs" in Page(out.read_text()).texts


def test_tensorboard_of_several_optimizers():
    """Bytes are summed; steps are those of the optimizer with the most steps."""
    names = "bytes", "compression_ratio"
    logs = {f"{prefix}_total_{name}": 10.0 for prefix in ("a", "b_a") for name in names}
    logs |= {"a_iterations": 7.0, "b_a_iterations": 5.0, "loss": 1.0}
    epoch = record._epoch(3, logs, 2.0)
    assert (epoch.steps, epoch.sent_bytes, epoch.dense_bytes) == (7, 20, 200)
    del logs["a_total_compression_ratio"]
    assert record._epoch(3, logs, 2.0).dense_bytes is None


def test_command_line(tmp_path, capsys):
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path in paths:
        record.write_record(make_run(), path)
    out = tmp_path / "page.html"
    assert main.main(["report", *paths, "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: a, b, ")
    assert {"a", "b", "b, validation"} <= {*Page(out.read_text()).texts}
    (tmp_path / "c").mkdir()
    same = str(tmp_path / "c" / "a.json")
    record.write_record(make_run(), same)
    main.main(["report", paths[0], same, "--out", str(out)])
    assert same in Page(out.read_text()).texts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json"], "No such file"),
        (["."], "A directory must be one to which `keras.callbacks.TensorB"),
        (["page.txt"], "A record must be a file"),
        (["page.txt", "page.txt"], "Runs must be different files"),
    ],
)
def test_command_line_without_a_run_raises(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("page.txt").write_text("text")
    with pytest.raises(SystemExit, match=message):
        main.main(["report", *arguments])


@pytest.mark.parametrize("module", ["matplotlib", "tensorboard"])
def test_missing_package_is_named(tmp_path, monkeypatch, module):
    (tmp_path / "train").mkdir()
    path = tmp_path / "run.json"
    record.write_record(make_run(), path)
    for name in (module, "tensorboard.backend.event_processing"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    run = path if module == "matplotlib" else tmp_path
    with pytest.raises(SystemExit, match=r"pip install 'tf_dgc\[report\]'"):
        main.main(["report", str(run), "--out", str(tmp_path / "page.html")])


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (page.size, None, "-"),
        (page.size, 999, "999 B"),
        (page.size, 1.5e9, "1.5 GB"),
        (page.duration, None, "-"),
        (page.size, 999_600, "1 MB"),
        (page.size, 999_400, "999 kB"),
        (page.duration, 0.25, "0.25 s"),
        (page.duration, 150, "2 min 30 s"),
        (page.duration, 7260, "2 h 01 min"),
        (page.number, float("nan"), "-"),
        (page.number, 12345, "12,345"),
        (page.number, 0.123456, "0.1235"),
    ],
)
def test_formatting_of_numbers(function, value, text):
    assert function(value) == text


def test_missing_bars():
    groups = [page.Bars("a", [1.0, None]), page.Bars("b", [2.0, 3.0])]
    bars = page.bars(["x", "<y>"], groups, page.milliseconds)
    texts = [*xml.etree.ElementTree.fromstring(bars).itertext()]
    assert {"x", "<y>", "a", "b", "1.0 ms", "2.0 ms", "3.0 ms", "-"} <= {*texts}


@pytest.mark.parametrize(
    ("names", "models", "title"),
    [
        (["run"], ["resnet50"], "Training of resnet50"),
        (["a", "b"], ["resnet50", "resnet50"], "Training of resnet50: a, b"),
        (["a", "b"], ["sequential", "functional_12"], "Training runs: a, b"),
        (["a", "b"], ["sequential", "net"], "Training of net: a, b"),
        (["dgc"], ["sequential_1"], "Training run dgc: DGC"),
        (["run"], ["functional"], "Training run: DGC"),
    ],
)
def test_title_names_the_model_or_the_runs(names, models, title):
    runs = {n: make_run(name=m) for n, m in zip(names, models, strict=True)}
    assert title in Page(run_page.run_page(runs)).texts


@pytest.mark.parametrize("y", [[1e-9, 3e-9], [1.0, 1.00001], [20.0, 300.0], [2, 9e7]])
@pytest.mark.parametrize("log", ["", "xy"])
def test_ticks_are_plain_text(y, log):
    panel = page.Panel("x", "y", [page.Curve("a", [1, 30], y)], log=log)
    svg = xml.etree.ElementTree.fromstring(page.curves([panel], "ticks"))
    texts = [text for text in svg.itertext() if text.strip()]
    assert len(texts) > 5
    assert not [text for text in texts if "$" in text or "\\" in text]


def test_ticks_of_bytes_are_few():
    """Up to six labels, which do not overlap."""
    curve = page.Curve("a", [3_400_000, 121_000_000], [1.0, 2.0])
    svg = page.curves([page.Panel("bytes", "y", [curve], "B")], "bytes")
    assert 3 <= svg.count(" MB</text>") + svg.count("0 B</text>") <= 6


def test_colors_follow_the_dark_mode():
    """Curves, axes and grid have colors of the page's style sheet."""
    curves = [page.Curve(name, [1, 2], [1.0, 2.0]) for name in ("a", "b")]
    svg = page.curves([page.Panel("x", "y", curves)], "colors")
    for color in ("var(--color0)", "var(--color1)", "var(--grid)", "currentColor"):
        assert f"stroke: {color}" in svg
    assert not re.findall(r"(?:fill|stroke): #\w+", svg)
