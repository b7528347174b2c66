// The operations as TensorFlow knows them; kernels register for them per device.
#include "attributes.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_dgc {
namespace {

using tensorflow::shape_inference::InferenceContext;

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
largest magnitude out as one buffer (see docs/contributing/wire_format.md).

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

REGISTER_OP("TfDgcLargest")
    .Attr("T: {float, double}")
    .Input("values: T")
    .Input("k: int32")
    .Input("offset: int32")
    .Output("positions: int32")
    .SetShapeFn([](InferenceContext* c) {
      tensorflow::shape_inference::DimensionHandle k;
      TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(1, &k));
      c->set_output(0, c->Vector(k));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Where the k entries of largest magnitude are, ascending.

values: [n], finite.
k: 1 <= k <= n.
offset: 0 <= offset < n. Of equal magnitudes those that come first in cyclic order from here
  are taken.
positions: [k].
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

REGISTER_OP("TfDgcPut")
    .Attr("T: list({float, double})")
    .Attr("num_variables: int >= 1")
    .Attr(TF_DGC_VALUE_TYPES)
    .Attr("fingerprint: int")
    .Input("variables: num_variables * resource")
    .Input("buffers: int32")
    .Input("counts: int32")
    .Output("nonfinite: int32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sets variables of types T, in place, to what one worker's buffer has, at the positions that
were sent; other entries are not touched. TensorFlow's own scatter would have every later
read of the variable copy all of it.

buffers: [1, words].
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
