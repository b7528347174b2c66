// The operations as TensorFlow knows them; kernels register for them per device.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_dgc {
namespace {

using tensorflow::shape_inference::InferenceContext;

#define TF_DGC_VALUE_TYPES                                                             \
  "value_types: list({'float32', 'float64', 'bfloat16', 'float16', 'sign', 'exempt', " \
  "'mxint8', 'mxfp4', 'exempt:bfloat16', 'exempt:mxint8'})"

// What every operation that applies update rules takes; rule_kernel.h reads it.
#define TF_DGC_RULE_OP(name)                    \
  REGISTER_OP(name)                             \
      .Attr("rules: list(string)")              \
      .Attr("rule_of: list(int)")               \
      .Attr("decays: list(bool)")               \
      .Attr("num_updated: int >= 1")            \
      .Input("updated: num_updated * resource") \
      .Input("hyperparameters: float64")        \
      .SetIsStateful()

REGISTER_OP("TfDgcCompress")
    .Attr("T: list({float, double, bfloat16, half})")
    .Attr("num_velocity: int >= 0")
    .Attr("num_residual: int >= 1")
    .Attr("num_rows: int >= 0")
    .Attr("sparse: list(int)")
    .Attr("num_moments: int >= 0")
    .Attr("divided: list(int)")
    .Attr(TF_DGC_VALUE_TYPES)
    .Attr("nesterov: bool")
    .Attr("factor_masking: bool")
    .Attr("largest_exponents: list(int)")
    .Attr("fingerprint: int")
    .Input("gradients: T")
    .Input("velocity: num_velocity * resource")
    .Input("residual: num_residual * resource")
    .Input("momentum: float64")
    .Input("scales: float64")
    .Input("counts: int32")
    .Input("offsets: int32")
    .Input("rows: num_rows * int64")
    .Input("moments: num_moments * resource")
    .Input("divisors: float64")
    .Output("words: int32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Accumulates gradients into velocity and residual, in place, and takes the entries of
largest magnitude out as one buffer (see docs/wire_format.md).

gradients: one per tensor; [rows, ...] of a sparse one, which is zero elsewhere.
velocity: variables, one per tensor, or none for accumulation without momentum.
residual: variables, one per tensor; float64 for double gradients, else float32.
momentum: scalar.
scales: [tensors], what gradients are multiplied by; NaN leaves the step's gradients out.
counts: [tensors], entries to send of each; all of an exempt tensor.
offsets: [tensors], the position from which ties are broken.
largest_exponents: [tensors], e where at most 2**e is sent of an entry and the rest is kept.
sparse: the tensors whose gradients are sparse.
rows: indices of the rows of these, ascending and distinct.
divided: the tensors whose gradients are divided before they are accumulated.
moments: variables of the second moments of these, like the residual.
divisors: [divided, 5], factor, rest, epsilon, share and largest (custom_ops/cpu/dividing.h);
  a factor of 0 leaves gradient and moment as they are.
words: the buffer.
)doc");

REGISTER_OP("TfDgcAllFinite")
    .Attr("T: list({float, double, bfloat16, half}) >= 1")
    .Input("values: T")
    .Output("finite: bool")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Whether no entry of any tensor is NaN or infinite.
)doc");

REGISTER_OP("TfDgcSum")
    .Attr("T: list({float, double})")
    .Attr("sizes: list(int)")
    .Attr(TF_DGC_VALUE_TYPES)
    .Attr("fingerprint: int")
    .Input("buffers: int32")
    .Input("counts: int32")
    .Output("nonfinite: int32")
    .Output("sums: T")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> sizes;
      TF_RETURN_IF_ERROR(c->GetAttr("sizes", &sizes));
      c->set_output(0, c->Scalar());
      for (size_t i = 0; i < sizes.size(); ++i) c->set_output(i + 1, c->Vector(sizes[i]));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Decodes the buffers of all workers and adds them, entry by entry in their order.

buffers: [workers, words].
counts: [tensors], entries sent of each.
nonfinite: workers whose gradient was not finite.
sums: [n] per tensor.
)doc");

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
words: a buffer of the same form, the same if both change places.
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

// The inputs of operations with regions, behind their own.
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

REGISTER_OP("TfDgcDescend")
    .Attr("T: list({float, double})")
    .Attr("num_variables: int >= 1")
    .Attr(TF_DGC_VALUE_TYPES)
    .Attr("fingerprint: int")
    .Input("variables: num_variables * resource")
    .Input("rate: float64")
    .Input("buffers: int32")
    .Input("counts: int32")
    .Output("nonfinite: int32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Subtracts rate times the sum of all workers' buffers from variables of types T, in place,
at the positions that were sent; other entries are not touched.
)doc");

TF_DGC_RULE_OP("TfDgcApply")
    .Attr("T: list({float})")
    .Attr(TF_DGC_VALUE_TYPES)
    .Attr("fingerprint: int")
    .Input("buffers: int32")
    .Input("counts: int32")
    .Output("nonfinite: int32")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Updates variables by the sum of all workers' buffers, as an optimizer of Keras does.

rules: names of the rules (custom_ops/cpu/rules.h).
rule_of: [tensors], which of these a variable is updated by.
decays: [tensors], whether the weight decay is for a variable.
updated: each variable, followed by its slots, all float32.
hyperparameters: [rules, 6] (custom_ops/cpu/rules.h).
buffers: [workers, words].
counts: [tensors], entries sent of each.
nonfinite: workers whose gradient was not finite.
)doc");

TF_DGC_RULE_OP("TfDgcApplySums")
    .Attr("num_sums: int >= 1")
    .Attr("flat: bool")
    .Input("sums: num_sums * float")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Updates variables by sums, as an optimizer of Keras does.

rules, rule_of, decays, updated, hyperparameters: as of TfDgcApply.
flat: whether the sums are one vector of all tensors, behind a flag.
sums: one per variable, of its size, or the vector.
)doc");

}  // namespace
}  // namespace tf_dgc
