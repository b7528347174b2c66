"""What the package offers by name, and what a wheel has beside modules."""

import importlib
import pathlib

import pytest

import tf_dgc

PACKAGE = pathlib.Path(tf_dgc.__file__).parent
PUBLIC = {
    "tf_dgc": """
        Advice CompressedCrossDeviceOps CompressedOptimizer CompressionStats
        DGCOptimizer DelayedNesterov LocalOptimizer NovoGrad ServerOptimizer advise
        average_statistics callbacks cluster compressors dgc_for_steps diloco exchanges
        local_sgd multi_worker_strategy post_local_sgd prepare saving schedules
        sparse_loco
    """,
    "tf_dgc.callbacks": """
        BackupAndRestore CompressionMonitor ModelCheckpoint find_compressed_optimizer
    """,
    "tf_dgc.compressors": """
        ATOMO AdaComp BFloat16 ChunkedTopK Compressor CountSketch DIANA DeMo Draw
        ECQ EFSignSGD Entries Exchange Float16 Gather GlobalTopK LAQ LGC METHODS Natural
        NoCompression OneBit OneRound PowerSGD QSGD RandomK Result
        RotatedQuantization SBC STC SampledThreshold ScaleCom SignSGD Signum
        StateSpec Sum TernGrad Threshold TopK TwoBit Uniform8Bit VarianceBased
        base get num_sent tie_offsets top_k whole
    """,
    "tf_dgc.exchanges": """
        Asked Auto Butterfly ByOwners Cost Exchange GTopK Gossip Hierarchical Links
        OkTopK Place Ring Rounds Star Tree TwoWay get graphs names overlap predict
    """,
    "tf_dgc.saving": "checkpoint_directory save_model save_weights",
    "tf_dgc.schedules": """
        PiecewiseConstantPeriod PiecewiseConstantSparsity SparsitySchedule
        WarmupSparsity for_steps
    """,
}
FOR_OTHER_ROOMS = {"schedules": {"asking", "base", "comparing"}}
ROOMS = sorted(p.parent.name for p in PACKAGE.glob("*/__init__.py"))


@pytest.mark.parametrize("module", PUBLIC)
def test_names(module):
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [n for n in dir(found) if n[0] != "_"]
    assert sorted(names) == PUBLIC[module].split()
    for name in names:
        getattr(found, name)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_names_its_modules(room):
    found = importlib.import_module(f"tf_dgc.{room}")
    modules = {p.stem for p in (PACKAGE / room).glob("*.py")} - {"__init__"}
    # These offer what their modules define, by an import of each, or the module.
    if room in ("compressors", "exchanges", "schedules"):
        modules -= FOR_OTHER_ROOMS.get(room, set())
        defined = {getattr(v, "__module__", "") for v in vars(found).values()}
        named = {f"tf_dgc.{room}.{name}" for name in getattr(found, "__all__", [])}
        assert defined | named >= {f"tf_dgc.{room}.{m}" for m in modules}
    else:
        assert sorted(found.__all__) == sorted(modules)


def test_the_types_are_installed():
    """A checker reads the annotations of an installed package only with `py.typed`."""
    assert (PACKAGE / "py.typed").is_file()
