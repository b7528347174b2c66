"""Public names of the package, and `py.typed`."""

import importlib
import pathlib

import pytest

import tf_dgc

PACKAGE = pathlib.Path(tf_dgc.__file__).parent
PUBLIC = {
    "tf_dgc": """
        Advice CompressedCrossDeviceOps CompressedOptimizer CompressionStats
        Corrections Diagnostics StalenessCorrection
        DGCOptimizer DelayedNesterov LocalOptimizer NovoGrad ServerOptimizer advise
        average_statistics callbacks cluster collectives compressors dgc_for_steps
        diloco local_sgd multi_worker_strategy post_local_sgd prepare saving schedules
        sparse_loco
    """,
    "tf_dgc.callbacks": """
        BackupAndRestore CompressionMonitor ModelCheckpoint find_compressed_optimizer
    """,
    "tf_dgc.compressors": """
        Aggregation AllGather AllReduce Compressor LowRank METHODS NativeMethod OneRound
        Quantizer RandomKeys Result SparseEntries Sparsifier StateSpec base from_words
        get maximum num_sent num_stream_words pack_bits tie_offsets to_dense_tensor
        to_words top_k unpack_bits
    """,
    "tf_dgc.collectives": """
        AlgorithmSteps Auto Butterfly CollectiveAlgorithm Cost GTopK Gossip Hierarchical
        LinkSpeeds OkTopK Overlapped
        OwnedRegionsAlgorithm Rank RequestSize Ring Star Tree TwoWay
        cost_model get graphs names predict_seconds
    """,
    "tf_dgc.saving": "checkpoint_directory save_model save_weights",
    "tf_dgc.schedules": """
        FollowLearningRate PiecewiseConstantPeriod PiecewiseConstantSparsity
        SparsitySchedule WarmupSparsity for_steps
    """,
}


@pytest.mark.parametrize("module", PUBLIC)
def test_names(module):
    imported = importlib.import_module(module)
    names = getattr(imported, "__all__", None)
    names = names or [n for n in dir(imported) if n[0] != "_"]
    expected = PUBLIC[module].split()
    if module == "tf_dgc.compressors":
        expected += [method.__name__ for method in imported.METHODS.values()]
    assert sorted(names) == sorted(expected)
    for name in names:
        getattr(imported, name)


def test_types_are_installed():
    """A checker reads the annotations of an installed package only with `py.typed`."""
    assert (PACKAGE / "py.typed").is_file()
