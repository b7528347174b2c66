// What the kernels of all devices take from an operation's attributes and inputs.
#ifndef TF_DGC_TENSORFLOW_WIRE_KERNEL_H_
#define TF_DGC_TENSORFLOW_WIRE_KERNEL_H_

#include <cmath>
#include <string>
#include <vector>

#include "border.h"
#include "compress.h"
#include "divisors.h"
#include "guard.h"
#include "sparse_rows.h"
#include "types.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "variables.h"

namespace tf_dgc {

inline ValueType ValueTypeOf(const std::string& name) {
  if (name == "float32") return ValueType::kFloat32;
  if (name == "float64") return ValueType::kFloat64;
  if (name == "bfloat16") return ValueType::kBFloat16;
  if (name == "float16") return ValueType::kFloat16;
  if (name == "sign") return ValueType::kSign;
  if (name == "mxint8") return ValueType::kMxInt8;
  if (name == "mxfp4") return ValueType::kMxFp4;
  if (name == "exempt:bfloat16") return ValueType::kExemptBFloat16;
  if (name == "exempt:mxint8") return ValueType::kExemptMxInt8;
  return ValueType::kExempt;
}

// What the operations share: types of the tensors, and the fingerprint. `Base` is OpKernel or
// AsyncOpKernel.
template <class Base>
class WireKernel : public Base {
 public:
  explicit WireKernel(tensorflow::OpKernelConstruction* context) : Base(context) {
    std::vector<std::string> value_types;
    int64_t fingerprint;
    OP_REQUIRES_OK(context, context->GetAttr("T", &types_));
    OP_REQUIRES_OK(context, context->GetAttr("value_types", &value_types));
    OP_REQUIRES_OK(context, context->GetAttr("fingerprint", &fingerprint));
    fingerprint_ = static_cast<uint32_t>(fingerprint);
    for (const std::string& name : value_types) value_types_.push_back(ValueTypeOf(name));
    OP_REQUIRES(context, types_.size() == value_types_.size(),
                absl::InvalidArgumentError("There must be one value type per tensor."));
    GiveToTensorFlow();
  }

 protected:
  size_t num_tensors() const { return types_.size(); }

  absl::Status MakeLayout(const std::vector<int64_t>& sizes, const tensorflow::Tensor& counts,
                          std::vector<Layout>* layout) const {
    if (sizes.size() != num_tensors() || counts.NumElements() != int64_t(num_tensors())) {
      return absl::InvalidArgumentError("There must be one size and one count per tensor.");
    }
    for (size_t i = 0; i < num_tensors(); ++i) {
      const bool wide = types_[i] == tensorflow::DT_DOUBLE;
      layout->push_back({sizes[i], counts.flat<int32_t>()(i), wide, value_types_[i]});
      const std::string wrong = CheckLayout(layout->back());
      if (!wrong.empty()) return absl::InvalidArgumentError(wrong);
    }
    return absl::OkStatus();
  }

  std::vector<tensorflow::DataType> types_;
  std::vector<ValueType> value_types_;
  uint32_t fingerprint_;
};

// The inputs of TfDgcCompress, checked; variables are locked as long as it exists. Scales
// and offsets may be on another device, so the tensors have none yet.
struct CompressInputs {
  std::vector<Layout> layout;
  std::vector<Tensor> tensors;
  double momentum;
  const tensorflow::Tensor* scales;
  const tensorflow::Tensor* offsets;
  Rule rule;
  LockedVariables velocity;
  LockedVariables residual;
  LockedDivisors divisors;
};

// An operation whose tensors' sizes are an attribute.
template <class Base>
class Sized : public Base {
 public:
  explicit Sized(tensorflow::OpKernelConstruction* context) : Base(context) {
    OP_REQUIRES_OK(context, context->GetAttr("sizes", &sizes_));
    GiveToTensorFlow();
  }
  ~Sized() override { TakeFromTensorFlow(); }

 protected:
  std::vector<int64_t> sizes_;
};

class CompressBase : public WireKernel<tensorflow::OpKernel> {
 public:
  explicit CompressBase(tensorflow::OpKernelConstruction* context) : WireKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("nesterov", &nesterov_));
    OP_REQUIRES_OK(context, context->GetAttr("factor_masking", &factor_masking_));
    OP_REQUIRES_OK(context, context->GetAttr("largest_exponents", &largest_exponents_));
    OP_REQUIRES_OK(context, context->GetAttr("sparse", &sparse_));
    OP_REQUIRES_OK(context, context->GetAttr("divided", &divided_));
    OP_REQUIRES(context, largest_exponents_.size() == num_tensors(),
                absl::InvalidArgumentError("There must be one exponent per tensor."));
    GiveToTensorFlow();
  }

 protected:
  // `copy` copies memory of the operation's device, see LockedVariables. Divisors are only
  // locked: their numbers are on that device.
  template <class Copy>
  absl::Status Collect(tensorflow::OpKernelContext* context, Copy copy, CompressInputs* inputs) {
    tensorflow::OpInputList gradients, velocity, residual;
    TF_RETURN_IF_ERROR(context->input_list("gradients", &gradients));
    TF_RETURN_IF_ERROR(context->input_list("velocity", &velocity));
    TF_RETURN_IF_ERROR(context->input_list("residual", &residual));
    const int first = gradients.size() + velocity.size() + residual.size();
    const tensorflow::Tensor& momentum = context->input(first);
    inputs->scales = &context->input(first + 1);
    inputs->offsets = &context->input(first + 3);
    const int64_t num = num_tensors();
    if (residual.size() != num || inputs->scales->NumElements() != num ||
        inputs->offsets->NumElements() != num || momentum.NumElements() != 1 ||
        (velocity.size() > 0 && velocity.size() != num)) {
      return absl::InvalidArgumentError(
          "There must be one residual, scale and offset per tensor, one velocity per tensor "
          "or none, and one momentum.");
    }
    inputs->momentum = momentum.flat<double>()(0);
    inputs->rule = velocity.size() == 0 ? Rule::kNone
                   : nesterov_          ? Rule::kNesterov
                                        : Rule::kMomentum;
    TF_RETURN_IF_ERROR(inputs->velocity.Lock(context, velocity));
    TF_RETURN_IF_ERROR(inputs->residual.Lock(context, residual));
    std::vector<Rows> rows;
    const auto size_of = [&](int64_t i) { return inputs->residual.Size(i); };
    TF_RETURN_IF_ERROR(FindRows(context, sparse_, gradients, size_of, &rows));
    std::vector<int64_t> sizes;
    for (int i = 0; i < num; ++i) {
      sizes.push_back(rows[i].sparse ? inputs->residual.Size(i) : gradients[i].NumElements());
    }
    TF_RETURN_IF_ERROR(MakeLayout(sizes, context->input(first + 2), &inputs->layout));
    for (int i = 0; i < num; ++i) {
      const Layout& layout = inputs->layout[i];
      const auto type = layout.wide ? tensorflow::DT_DOUBLE : tensorflow::DT_FLOAT;
      Tensor tensor{layout, GradientTypeOf(types_[i]), gradients[i].data(), nullptr, nullptr, 1, 0};
      tensor.largest = std::ldexp(1.0, static_cast<int>(largest_exponents_[i]));
      tensor.rows = rows[i];
      if (inputs->rule != Rule::kNone) {
        TF_RETURN_IF_ERROR(inputs->velocity.Writable(context, i, type, sizes[i], "velocity", copy,
                                                     &tensor.velocity));
      }
      TF_RETURN_IF_ERROR(inputs->residual.Writable(context, i, type, sizes[i], "residual", copy,
                                                   &tensor.residual));
      inputs->tensors.push_back(tensor);
    }
    return LockDivisors(context, inputs);
  }

  absl::Status LockDivisors(tensorflow::OpKernelContext* context, CompressInputs* inputs) const {
    for (const int64_t i : divided_) {
      if (i < 0 || i >= static_cast<int64_t>(inputs->tensors.size())) {
        return absl::InvalidArgumentError("There is no such gradient to be divided.");
      }
    }
    return inputs->divisors.Lock(context, divided_);
  }

  bool nesterov_;
  bool factor_masking_;
  std::vector<int64_t> largest_exponents_;
  std::vector<int64_t> sparse_;
  std::vector<int64_t> divided_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_TENSORFLOW_WIRE_KERNEL_H_
