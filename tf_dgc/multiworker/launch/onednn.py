"""Whether TensorFlow uses oneDNN on this processor, without importing TensorFlow."""

import os
import pathlib
import platform
import re
from collections.abc import Mapping

VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
ADVICE = (
    f"TensorFlow leaves oneDNN off on this processor; {VARIABLE}=1 in the environment "
    "of all workers often makes steps several times as fast. "
    f"{VARIABLE}=0 keeps it off without this line."
)
# TensorFlow 2.21 (tensorflow/core/util/port.cc) turns oneDNN on by itself on x86-64
# processors with one of these, and on Arm's Neoverse V1.
_ON_WITH = frozenset(
    ["avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"]
)


def advice(
    environment: Mapping[str, str] | None = None, cpuinfo: str | None = None
) -> str | None:
    """Return advice for a user whose TensorFlow does not use oneDNN, or None."""
    environment = os.environ if environment is None else environment
    setting = environment.get(VARIABLE, "").lower()
    if setting in ("0", "1", "false", "true"):  # TensorFlow ignores all others
        return None
    features = _features(read_cpuinfo() if cpuinfo is None else cpuinfo)
    return None if not features or features & _ON_WITH else ADVICE


def processor(cpuinfo: str | None = None) -> str:
    """Return the processor's name and the widest vector instructions it has."""
    cpuinfo = read_cpuinfo() if cpuinfo is None else cpuinfo
    name = _field("model name", cpuinfo) or platform.machine()  # none on Arm
    available = _features(cpuinfo)
    levels = [f for f in ("avx512_vnni", "avx512f", "avx2") if f in available]
    return f"{name} ({levels[0]})" if levels else name


def read_cpuinfo() -> str:
    """Return `/proc/cpuinfo`, empty where there is none."""
    try:
        return pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


def _features(cpuinfo: str) -> frozenset[str]:
    return frozenset(_field("flags", cpuinfo).split())


def _field(name: str, cpuinfo: str) -> str:
    match = re.search(rf"^{name}\s*: *(.*)$", cpuinfo, re.MULTILINE)
    return match.group(1) if match else ""
