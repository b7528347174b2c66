// The operations of native methods as TensorFlow knows them.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_dgc {
namespace {

using tensorflow::shape_inference::InferenceContext;

// What all of them are told of the tensors.
#define TF_DGC_METHODS \
  .Attr("methods: list(string)") \
  .Attr("num_parameters: list(int)") \
  .Attr("parameters: list(float)") \
  .Attr("sizes: list(int)") \
  .Attr("columns: list(int)") \
  .Attr("vectors: list(int)") \
  .Attr("indices: list(int)") \
  .Attr("seed: int") \
  .Attr("fingerprints: list(int)") \
  .Attr("firsts: list(string)") \
  .Attr("first_vectors: list(int)") \
  .Attr("num_numbers: list(int)")

// What arrives from all workers, and what is said of it before the sums.
#define TF_DGC_ARRIVED \
  .Attr("V: list({float, half, bfloat16}) >= 0") \
  .Attr("num_rounds: int >= 1") \
  .Input("buffers: num_rounds * int32") \
  .Input("totals: V") \
  .Attr("num_shared: int >= 0") \
  .Input("iteration: int64") \
  .Input("numbers: float") \
  .Input("shared: num_shared * resource") \
  .Output("nonfinite: int32") \
  .Output("finite: bool") \
  .Output("norms: float")

// Of the outputs of TF_DGC_ARRIVED; returns the sizes of the tensors too.
absl::Status SetArrivedShapes(InferenceContext* c, std::vector<int64_t>* sizes) {
  TF_RETURN_IF_ERROR(c->GetAttr("sizes", sizes));
  c->set_output(0, c->Scalar());
  c->set_output(1, c->Vector(sizes->size()));
  c->set_output(2, c->Vector(InferenceContext::kUnknownDim));
  return absl::OkStatus();
}

REGISTER_OP("TfDgcEncode")
    .Attr("T: list({float, bfloat16, half})")
    .Attr("num_velocity: int >= 0")
    .Attr("num_residual: int >= 0")
    .Attr("num_states: int >= 0")
    .Attr("nesterov: bool")
    .Attr("factor_masking: bool")
    TF_DGC_METHODS
    .Input("gradients: T")
    .Input("velocity: num_velocity * resource")
    .Input("residual: num_residual * resource")
    .Input("states: num_states * resource")
    .Attr("num_rows: int >= 0")
    .Attr("sparse: list(int)")
    .Input("rows: num_rows * int64")
    .Attr("num_moments: int >= 0")
    .Attr("divided: list(int)")
    .Input("moments: num_moments * resource")
    .Input("divisors: float64")
    .Input("momentum: float64")
    .Input("scales: float64")
    .Attr("round: int >= 0")
    .Input("iteration: int64")
    .Input("numbers: float")
    .Input("worker: int32")
    .Attr("V: list({float, half, bfloat16}) >= 0")
    .Output("finite: bool")
    .Output("entries: int64")
    .Output("words: int32")
    .Output("notes: float")
    .Output("sent: V")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 2; ++i) c->set_output(i, c->Scalar());
      for (int i = 2; i < c->num_outputs(); ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Accumulates gradients, in place, and codes what a method sends of each tensor.

gradients: one per tensor; [rows, ...] of a sparse one, which is zero elsewhere.
velocity: float32 variables, one per tensor, or none for accumulation without momentum.
residual: float32 variables, one per tensor, or none if nothing is kept back.
states: float32 variables, those of every tensor's method, tensor after tensor.
sparse, rows, divided, moments, divisors: as of TfDgcCompress.
momentum: scalar.
scales: [tensors], what gradients are multiplied by; NaN leaves the step's gradients out.
iteration: scalar, number of the step.
numbers: those that each tensor's method takes in this round, tensor after tensor.
worker: scalar, index of this worker.
round: 0, or 1 for what methods of two rounds send then.
methods: name of each tensor's method.
firsts: name of what it does in the first round, if it has two; else "".
first_vectors: what `vectors` is, of that round.
num_numbers: how many numbers it takes.
fingerprints: those of the buffers of each round.
num_parameters: number of parameters of each tensor's method.
parameters: those of all tensors, one after the other.
sizes: entries of each tensor.
columns: length of each tensor's last axis, 1 for ranks below 2.
indices: of each tensor among all of the model, for draws.
vectors: index in `sent` of what each tensor is part of, -1 if it is in `words`.
finite: scalar, whether all gradients were taken.
entries: scalar, how many were sent of all tensors.
words: the buffer (see docs/contributing/wire_format.md); empty if nothing is to be gathered.
notes: what methods are to know of this round in the next one, tensor after tensor.
sent: vectors to be summed, each behind a flag that is 1 if not all gradients were taken.
)doc");

REGISTER_OP("TfDgcDecode")
    .Attr("num_tensors: int >= 1")
    TF_DGC_METHODS
    TF_DGC_ARRIVED
    .Output("sums: num_tensors * float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> sizes;
      TF_RETURN_IF_ERROR(SetArrivedShapes(c, &sizes));
      for (size_t i = 0; i < sizes.size(); ++i) c->set_output(i + 3, c->Vector(sizes[i]));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Decodes the buffers of all workers and adds them, entry by entry in their order.

buffers: [workers, words], of each round.
totals: sums of the vectors, of all rounds.
iteration: scalar, number of the step.
numbers: those that each tensor's method takes from the first round, tensor after tensor.
shared: float32 variables that all workers remember alike, those of every tensor's method,
  tensor after tensor; they move on if all sums are finite.
nonfinite: workers whose gradient was not finite.
finite: [tensors], whether each sum is.
norms: of the sums of those methods that need it, if all are finite.
sums: [n] per tensor.
)doc");

REGISTER_OP("TfDgcDecodeApply")
    .Attr("rules: list(string)")
    .Attr("rule_of: list(int)")
    .Attr("decays: list(bool)")
    .Attr("num_updated: int >= 1")
    TF_DGC_METHODS
    .Input("updated: num_updated * resource")
    .Input("hyperparameters: float64")
    TF_DGC_ARRIVED
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> sizes;
      return SetArrivedShapes(c, &sizes);
    })
    .Doc(R"doc(
Decodes the buffers of all workers and updates variables and slots by their sums, in place,
unless one of these is not finite.

rules, rule_of, decays, updated, hyperparameters: as of TfDgcApply.
buffers: [workers, words], of each round.
totals: sums of the vectors, of all rounds.
iteration: scalar, number of the step.
numbers: those that each tensor's method takes from the first round, tensor after tensor.
shared: float32 variables that all workers remember alike, those of every tensor's method,
  tensor after tensor; they move on if all sums are finite.
nonfinite: workers whose gradient was not finite.
finite: [tensors], whether each sum is.
norms: of the sums of those methods that need it, if all are finite.
)doc");

}  // namespace
}  // namespace tf_dgc
