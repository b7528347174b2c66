"""Advice about oneDNN, and TensorFlow's own rule for its default."""

import os
import platform

import pytest

from tf_dgc._internals import tracing
from tf_dgc.cli import doctor
from tf_dgc.multiworker.launch import onednn

OLD = "processor\t: 0\nmodel name\t: Old One\nflags\t\t: fpu sse4_2 avx avx2 fma\n"
NEW = OLD.replace("fma", "fma avx512f avx512_vnni")
ARM = "processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd0c\n"


@pytest.mark.parametrize(
    ("cpuinfo", "setting", "advised"),
    [
        (OLD, None, True),
        (OLD, "", True),
        (OLD, "yes", True),  # TensorFlow warns, and uses its default
        (OLD, "1", False),
        (OLD, "True", False),
        (OLD, "0", False),
        (NEW, None, False),
        (OLD.replace("fma", "avx_vnni"), None, False),
        (OLD.replace("fma", "amx_tile"), None, False),
        (ARM, None, False),
        ("", None, False),
    ],
)
def test_advice(cpuinfo, setting, advised):
    environment = {} if setting is None else {onednn.VARIABLE: setting}
    advice = onednn.advice(environment, cpuinfo)
    assert advice == (onednn.ADVICE if advised else None)


def test_the_processor_has_a_name():
    assert onednn.processor(OLD) == "Old One (avx2)"
    assert onednn.processor(NEW) == "Old One (avx512_vnni)"
    assert onednn.processor(ARM) == onednn.processor("") == platform.machine()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the rule is x86-64's")
@pytest.mark.skipif(onednn.VARIABLE in os.environ, reason="it decides")
def test_tensorflow_uses_the_same_rule():
    assert tracing.uses_onednn() == (onednn.advice() is None)


@pytest.mark.parametrize("uses", [False, True])
def test_doctor_prints_the_state(monkeypatch, capsys, uses):
    monkeypatch.setattr(onednn, "read_cpuinfo", lambda: NEW if uses else OLD)
    monkeypatch.setattr(tracing, "uses_onednn", lambda: uses)
    monkeypatch.delenv(onednn.VARIABLE, raising=False)
    doctor.main()
    printed = capsys.readouterr().out
    state = "on" if uses else "off"
    assert f"oneDNN              {state}: TensorFlow's default here" in printed
    assert ("TF_ENABLE_ONEDNN_OPTS=1 in the environment" in printed) == (not uses)
    monkeypatch.setenv(onednn.VARIABLE, "0")
    doctor.main()
    printed = capsys.readouterr().out
    assert f"oneDNN              {state}: TF_ENABLE_ONEDNN_OPTS=0" in printed
    assert onednn.ADVICE not in printed
