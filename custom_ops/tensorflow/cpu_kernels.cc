// TensorFlow's side of the CPU kernels: tensors, variables and threads in, errors out.
#include <string>
#include <vector>

#include "compress.h"
#include "cpu_context.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "update.h"

namespace tf_dgc {
namespace {

using tensorflow::DataType;
using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
// Not tf_dgc::Tensor.
using Values = tensorflow::Tensor;

GradientType GradientTypeOf(DataType type) {
  switch (type) {
    case tensorflow::DT_DOUBLE:
      return GradientType::kFloat64;
    case tensorflow::DT_BFLOAT16:
      return GradientType::kBFloat16;
    case tensorflow::DT_HALF:
      return GradientType::kFloat16;
    default:
      return GradientType::kFloat32;
  }
}

ValueType ValueTypeOf(const std::string& name) {
  if (name == "float32") return ValueType::kFloat32;
  if (name == "float64") return ValueType::kFloat64;
  if (name == "bfloat16") return ValueType::kBFloat16;
  if (name == "float16") return ValueType::kFloat16;
  if (name == "sign") return ValueType::kSign;
  return ValueType::kExempt;
}

// What the operations share: types of the tensors, and the fingerprint.
class WireKernel : public OpKernel {
 public:
  explicit WireKernel(OpKernelConstruction* context) : OpKernel(context) {
    std::vector<std::string> value_types;
    int64_t fingerprint;
    OP_REQUIRES_OK(context, context->GetAttr("T", &types_));
    OP_REQUIRES_OK(context, context->GetAttr("value_types", &value_types));
    OP_REQUIRES_OK(context, context->GetAttr("fingerprint", &fingerprint));
    fingerprint_ = static_cast<uint32_t>(fingerprint);
    for (const std::string& name : value_types) value_types_.push_back(ValueTypeOf(name));
    OP_REQUIRES(context, types_.size() == value_types_.size(),
                absl::InvalidArgumentError("There must be one value type per tensor."));
  }

 protected:
  size_t num_tensors() const { return types_.size(); }

  absl::Status MakeLayout(const std::vector<int64_t>& sizes, const Values& counts,
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

  absl::Status Decode(OpKernelContext* context, const std::vector<Layout>& layout,
                      const Values& buffers, Threads& threads, Decoded* decoded) const {
    if (buffers.dims() != 2) {
      return absl::InvalidArgumentError("`buffers` must have shape [workers, words].");
    }
    const auto* words = reinterpret_cast<const uint32_t*>(buffers.flat<int32_t>().data());
    const std::string wrong = decoded->Decode(layout, words, buffers.dim_size(0),
                                              buffers.dim_size(1), fingerprint_, threads);
    if (wrong.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(wrong, ". All workers must run the same tf_dgc, model and settings."));
  }

  std::vector<DataType> types_;
  std::vector<ValueType> value_types_;
  uint32_t fingerprint_;
};

class CompressKernel : public WireKernel {
 public:
  explicit CompressKernel(OpKernelConstruction* context) : WireKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("nesterov", &nesterov_));
    OP_REQUIRES_OK(context, context->GetAttr("factor_masking", &factor_masking_));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList gradients, velocity_handles, residual_handles;
    OP_REQUIRES_OK(context, context->input_list("gradients", &gradients));
    OP_REQUIRES_OK(context, context->input_list("velocity", &velocity_handles));
    OP_REQUIRES_OK(context, context->input_list("residual", &residual_handles));
    const int first = gradients.size() + velocity_handles.size() + residual_handles.size();
    const Values& momentum = context->input(first);
    const Values& scales = context->input(first + 1);
    const Values& counts = context->input(first + 2);
    const Values& offsets = context->input(first + 3);
    const bool has_velocity = velocity_handles.size() > 0;
    const int64_t num = num_tensors();
    OP_REQUIRES(context,
                residual_handles.size() == num && scales.NumElements() == num &&
                    offsets.NumElements() == num && momentum.NumElements() == 1 &&
                    (!has_velocity || velocity_handles.size() == num),
                absl::InvalidArgumentError(
                    "There must be one residual, scale and offset per tensor, one velocity per "
                    "tensor or none, and one momentum."));
    std::vector<int64_t> sizes;
    for (int i = 0; i < num; ++i) sizes.push_back(gradients[i].NumElements());
    std::vector<Layout> layout;
    OP_REQUIRES_OK(context, MakeLayout(sizes, counts, &layout));

    LockedVariables velocity, residual;
    OP_REQUIRES_OK(context, velocity.Lock(context, velocity_handles));
    OP_REQUIRES_OK(context, residual.Lock(context, residual_handles));
    std::vector<Tensor> tensors;
    for (int i = 0; i < num; ++i) {
      const DataType accumulators = layout[i].wide ? tensorflow::DT_DOUBLE : tensorflow::DT_FLOAT;
      Tensor tensor{layout[i], GradientTypeOf(types_[i]), gradients[i].data(), nullptr, nullptr,
                    scales.flat<double>()(i), offsets.flat<int32_t>()(i)};
      OP_REQUIRES(context, sizes[i] == 0 || (tensor.offset >= 0 && tensor.offset < sizes[i]),
                  absl::InvalidArgumentError("An offset is not a position of its tensor."));
      if (has_velocity) {
        OP_REQUIRES_OK(context, velocity.Writable(context, i, accumulators, sizes[i], "velocity",
                                                  &tensor.velocity));
      }
      OP_REQUIRES_OK(context, residual.Writable(context, i, accumulators, sizes[i], "residual",
                                                &tensor.residual));
      tensors.push_back(tensor);
    }

    Values* words;
    OP_REQUIRES_OK(context, context->allocate_output(0, {BufferWords(layout)}, &words));
    const Rule rule = !has_velocity ? Rule::kNone : nesterov_ ? Rule::kNesterov : Rule::kMomentum;
    TensorFlowThreads threads(context);
    std::vector<Hint> hints = TakeHints(num);
    Compress(tensors,
             {rule, momentum.flat<double>()(0), factor_masking_, fingerprint_, CurrentLevel()},
             threads, hints, reinterpret_cast<uint32_t*>(words->flat<int32_t>().data()));
    const tensorflow::mutex_lock lock(mutex_);
    hints_ = std::move(hints);
  }

 private:
  // Steps of a parallel loop may run at once; one of them gets the hints.
  std::vector<Hint> TakeHints(int64_t num) {
    const tensorflow::mutex_lock lock(mutex_);
    std::vector<Hint> taken = std::move(hints_);
    hints_.clear();
    taken.resize(num);
    return taken;
  }

  bool nesterov_;
  bool factor_masking_;
  tensorflow::mutex mutex_;
  std::vector<Hint> hints_;
};

class SumKernel : public WireKernel {
 public:
  explicit SumKernel(OpKernelConstruction* context) : WireKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("sizes", &sizes_));
  }

  void Compute(OpKernelContext* context) override {
    std::vector<Layout> layout;
    OP_REQUIRES_OK(context, MakeLayout(sizes_, context->input(1), &layout));
    TensorFlowThreads threads(context);
    Decoded decoded;
    OP_REQUIRES_OK(context, Decode(context, layout, context->input(0), threads, &decoded));
    Values* nonfinite;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &nonfinite));
    nonfinite->scalar<int32_t>()() = decoded.num_nonfinite();
    std::vector<void*> sums;
    for (size_t i = 0; i < num_tensors(); ++i) {
      Values* sum;
      OP_REQUIRES_OK(context, context->allocate_output(i + 1, {sizes_[i]}, &sum));
      sums.push_back(sum->data());
    }
    decoded.Sum(sums, threads);
  }

 private:
  std::vector<int64_t> sizes_;
};

class DescendKernel : public WireKernel {
 public:
  using WireKernel::WireKernel;

  void Compute(OpKernelContext* context) override {
    OpInputList handles;
    OP_REQUIRES_OK(context, context->input_list("variables", &handles));
    const Values& rate = context->input(handles.size());
    OP_REQUIRES(context, rate.NumElements() == 1 && handles.size() == int(num_tensors()),
                absl::InvalidArgumentError("There must be one rate, and one type per variable."));
    LockedVariables variables;
    OP_REQUIRES_OK(context, variables.Lock(context, handles));
    std::vector<int64_t> sizes;
    std::vector<void*> data(num_tensors());
    for (int i = 0; i < handles.size(); ++i) sizes.push_back(variables.Size(i));
    std::vector<Layout> layout;
    OP_REQUIRES_OK(context, MakeLayout(sizes, context->input(handles.size() + 2), &layout));
    TensorFlowThreads threads(context);
    Decoded decoded;
    OP_REQUIRES_OK(context, Decode(context, layout, context->input(handles.size() + 1), threads,
                                   &decoded));
    for (int i = 0; i < handles.size(); ++i) {
      OP_REQUIRES_OK(context, variables.Writable(context, i, types_[i], sizes[i], "variable",
                                                 &data[i]));
    }
    decoded.Descend(data, rate.flat<double>()(0), threads);
    Values* nonfinite;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &nonfinite));
    nonfinite->scalar<int32_t>()() = decoded.num_nonfinite();
  }
};

REGISTER_KERNEL_BUILDER(Name("TfDgcCompress").Device(tensorflow::DEVICE_CPU), CompressKernel);
REGISTER_KERNEL_BUILDER(Name("TfDgcSum").Device(tensorflow::DEVICE_CPU), SumKernel);
REGISTER_KERNEL_BUILDER(Name("TfDgcDescend").Device(tensorflow::DEVICE_CPU), DescendKernel);

}  // namespace
}  // namespace tf_dgc

// For `tf-dgc doctor`: the vector code that is used on this machine.
extern "C" __attribute__((visibility("default"))) const char* tf_dgc_vector_level() {
  return tf_dgc::LevelName(tf_dgc::CurrentLevel());
}
