"""Compression methods, one per file.

To add a method to the package, add a file here and an import below.
`tf_dgc.compressors.base` is the interface; `examples/own_compressor.py` shows a method
outside of the package.
"""

from typing import Any

import keras

from tf_dgc.arguments import show
from tf_dgc.codecs.bits import num_stream_words as num_stream_words
from tf_dgc.codecs.bits import pack_bits as pack_bits
from tf_dgc.codecs.bits import to_words as to_words
from tf_dgc.codecs.bits import unpack_bits as unpack_bits
from tf_dgc.collectives.requests import Aggregation as Aggregation
from tf_dgc.collectives.requests import AllGather as AllGather
from tf_dgc.collectives.requests import AllReduce as AllReduce
from tf_dgc.collectives.requests import Result as Result
from tf_dgc.collectives.requests import SparseEntries as SparseEntries
from tf_dgc.collectives.requests import to_dense_tensor as to_dense_tensor
from tf_dgc.compressors import base
from tf_dgc.compressors.adacomp import AdaComp as AdaComp
from tf_dgc.compressors.atomo import ATOMO as ATOMO
from tf_dgc.compressors.base import Compressor as Compressor
from tf_dgc.compressors.base import LowRank as LowRank
from tf_dgc.compressors.base import NativeMethod as NativeMethod
from tf_dgc.compressors.base import Quantizer as Quantizer
from tf_dgc.compressors.base import Sparsifier as Sparsifier
from tf_dgc.compressors.base import StateSpec as StateSpec
from tf_dgc.compressors.bfloat16 import BFloat16 as BFloat16
from tf_dgc.compressors.chunkedtopk import ChunkedTopK as ChunkedTopK
from tf_dgc.compressors.common.largest import top_k as top_k
from tf_dgc.compressors.common.one_round import OneRound as OneRound
from tf_dgc.compressors.common.one_round import from_words as from_words
from tf_dgc.compressors.common.one_round import maximum as maximum
from tf_dgc.compressors.countsketch import CountSketch as CountSketch
from tf_dgc.compressors.demo import DeMo as DeMo
from tf_dgc.compressors.diana import DIANA as DIANA
from tf_dgc.compressors.ecq import ECQ as ECQ
from tf_dgc.compressors.efsignsgd import EFSignSGD as EFSignSGD
from tf_dgc.compressors.float16 import Float16 as Float16
from tf_dgc.compressors.globaltopk import GlobalTopK as GlobalTopK
from tf_dgc.compressors.laq import LAQ as LAQ
from tf_dgc.compressors.lgc import LGC as LGC
from tf_dgc.compressors.natural import Natural as Natural
from tf_dgc.compressors.none import NoCompression as NoCompression
from tf_dgc.compressors.onebit import OneBit as OneBit
from tf_dgc.compressors.powersgd import PowerSGD as PowerSGD
from tf_dgc.compressors.qsgd import QSGD as QSGD
from tf_dgc.compressors.random_keys import RandomKeys as RandomKeys
from tf_dgc.compressors.randomk import RandomK as RandomK
from tf_dgc.compressors.rotated import RotatedQuantization as RotatedQuantization
from tf_dgc.compressors.sampledthreshold import SampledThreshold as SampledThreshold
from tf_dgc.compressors.sbc import SBC as SBC
from tf_dgc.compressors.scalecom import ScaleCom as ScaleCom
from tf_dgc.compressors.signsgd import SignSGD as SignSGD
from tf_dgc.compressors.signum import Signum as Signum
from tf_dgc.compressors.stc import STC as STC
from tf_dgc.compressors.terngrad import TernGrad as TernGrad
from tf_dgc.compressors.threshold import Threshold as Threshold
from tf_dgc.compressors.topk import TopK as TopK
from tf_dgc.compressors.topk import num_sent as num_sent
from tf_dgc.compressors.topk import tie_offsets as tie_offsets
from tf_dgc.compressors.twobit import TwoBit as TwoBit
from tf_dgc.compressors.uniform8bit import Uniform8Bit as Uniform8Bit
from tf_dgc.compressors.variancebased import VarianceBased as VarianceBased

METHODS: dict[str, type[Compressor]] = {
    value.name: value
    for value in list(globals().values())
    if isinstance(value, type)
    and issubclass(value, Compressor)
    and "name" in vars(value)
}
"""The methods of the package, by name."""


def __dir__() -> list[str]:
    """Return the public names, without the methods' modules."""
    requests = (AllReduce.__module__, Result.__module__)
    modules = (__name__, *requests, pack_bits.__module__)
    names = [
        name
        for name, value in globals().items()
        if str(getattr(value, "__module__", "")).startswith(modules)
        and not name.startswith("_")
    ]
    return ["Aggregation", "METHODS", "base", *names]


def get(identifier: Any) -> Compressor:
    """Return a compressor.

    Args:
        identifier: a `Compressor`; the name of a method, for its defaults; or the
            result of `keras.saving.serialize_keras_object` for a compressor.

    Raises:
        ValueError: if `identifier` is anything else, or if its class lacks one of the
            required attributes.
    """
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if isinstance(identifier, str) and identifier in METHODS:
        return METHODS[identifier]()
    if isinstance(identifier, Compressor):
        _check_attributes(identifier)
        return identifier
    raise ValueError(
        "`compressor` must be a `tf_dgc.compressors.Compressor` or the name of a "
        f"method: {', '.join(sorted(METHODS))}. "
        f"Received: compressor={show(identifier)} (of type {type(identifier)})"
    )


def _check_attributes(compressor: Compressor) -> None:
    choices_by_attribute: dict[str, tuple[str, ...] | None] = {
        "name": None,
        "reference": None,
        "kind": None,
        "aggregation": base.AGGREGATIONS,
        "error_feedback": base.FEEDBACK_RULES,
    }
    for name, choices in choices_by_attribute.items():
        value = getattr(compressor, name, None)
        is_text = isinstance(value, str) and (name != "name" or value.isidentifier())
        if not is_text or (choices is not None and value not in choices):
            allowed = f"one of {', '.join(choices)}" if choices else "a string"
            raise ValueError(
                f"The class attribute `{name}` of a compressor must be {allowed} (see "
                "`tf_dgc.compressors.Compressor`). "
                f"Received: {type(compressor).__name__}.{name} = {show(value)}"
            )
