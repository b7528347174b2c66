// The operations that merge entries on their way, as TensorFlow knows them.
#include "attributes.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_dgc {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("TfDgcMerge")
    .Attr("T: list({float, double})")
    .Attr("sizes: list(int)")
    .Attr(TF_DGC_VALUE_TYPES)
    .Attr("fingerprint: int")
    .Input("mine: int32")
    .Input("theirs: int32")
    .Input("counts: int32")
    .Output("words: int32")
    .Output("places: int32")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Adds up the entries of two workers' buffers, and keeps as many of each tensor as each has.

mine: [words].
theirs: [words], of the same form.
counts: [tensors], entries of each.
words: a buffer of the same form, the same if both change places; one that is refused if one of
  them is, as it is.
places: [entries], where each entry of `mine` is in it, -1 where it is left out; of all
  tensors that are not exempt, one behind the other.
)doc");

#define TF_DGC_PLACES_OP(name)          \
  REGISTER_OP(name)                     \
      .Attr("T: list({float, double})") \
      .Attr("sizes: list(int)")         \
      .Attr(TF_DGC_VALUE_TYPES)         \
      .Attr("fingerprint: int")         \
      .Attr("A: {float, double}")

// What operations with regions take besides; regions_kernel.cc reads it.
#define TF_DGC_REGIONS                \
  Attr("message_size: int")           \
      .Attr("message_fingerprint: int") \
      .Input("counts: int32")         \
      .Input("starts: int64")         \
      .Input("rooms: int32")          \
      .Input("capacity: int32")

TF_DGC_PLACES_OP("TfDgcReadPlaces")
    .Input("words: int32")
    .Input("counts: int32")
    .Output("places: int64")
    .Output("values: A")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->output(0));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Decodes a worker's buffer, as entries of all tensors that are not exempt, one behind the other.

words: [words].
counts: [tensors], entries of each.
places: [entries], ascending.
values: [entries].
)doc");

TF_DGC_PLACES_OP("TfDgcSplitPlaces")
    .Input("places: int64")
    .Input("values: A")
    .TF_DGC_REGIONS
    .Output("rows: int32")
    .Output("mine: int32")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(c->Dim(c->input(3), 0), InferenceContext::kUnknownDim));
      c->set_output(1, c->input(0));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Splits a worker's entries among the owners of regions.

places: [entries], ascending.
values: [entries].
counts: [tensors], entries of each.
starts: [workers], the first place of each region.
rooms: [workers, tensors], entries of each tensor in a message to the owner of a region.
capacity: entries in a message.
rows: [workers, words], a message for each owner.
mine: [entries], the place of each that is in one, else -1.
)doc");

TF_DGC_PLACES_OP("TfDgcCollectPlaces")
    .Input("rows: int32")
    .Input("worker: int32")
    .TF_DGC_REGIONS
    .Output("block: int32")
    .Output("places: int32")
    .Output("sums: A")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->Dim(c->input(0), 1)));
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(2, c->output(1));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Adds up the entries that the owner of a region has received, and keeps the largest.

rows: [workers, words], a message of each worker.
worker: the owner.
block: [words], a message for all workers.
places: [sums], ascending.
sums: [sums], all of them.
)doc");

TF_DGC_PLACES_OP("TfDgcUnitePlaces")
    .Input("blocks: int32")
    .Input("mine: int32")
    .Input("exempt: int32")
    .Input("finite: bool")
    .TF_DGC_REGIONS
    .Output("words: int32")
    .Output("delivered: bool")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->input(1));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Makes a buffer of the largest sums of all regions, as many of each tensor as a worker has.

blocks: [workers, words], the message of each owner.
mine: [entries], as TfDgcSplitPlaces returns it.
exempt: [words], of the exempt tensors, one behind the other.
finite: whether all gradients were.
words: the buffer.
delivered: [entries], which of a worker's entries are in it.
)doc");

}  // namespace
}  // namespace tf_dgc
