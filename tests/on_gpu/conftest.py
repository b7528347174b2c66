"""Training on a GPU of TensorFlow, or on the test device: `.ci/test-device`."""

import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(config, items):
    if config.getoption("--on-gpu"):
        return
    skip = pytest.mark.skip(reason="needs --on-gpu")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)
