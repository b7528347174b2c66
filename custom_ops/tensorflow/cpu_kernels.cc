// TensorFlow's side of the CPU kernels: tensors, variables and threads in, errors out.
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "compress.h"
#include "cpu_kernel.h"
#include "rule_kernel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "threads.h"
#include "update.h"
#include "wire_kernel.h"

namespace tf_dgc {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
// Not tf_dgc::Tensor.
using Values = tensorflow::Tensor;

class CompressKernel : public CpuKernel<CompressBase> {
 public:
  using CpuKernel::CpuKernel;
  ~CompressKernel() override { TakeFromTensorFlow(); }

 private:
  absl::Status FindDivisors(OpKernelContext* context, CompressInputs* inputs) const {
    for (size_t j = 0; j < divided_.size(); ++j) {
      const Layout& layout = inputs->layout[divided_[j]];
      const auto type = layout.wide ? tensorflow::DT_DOUBLE : tensorflow::DT_FLOAT;
      TF_RETURN_IF_ERROR(inputs->divisors.Find(context, static_cast<int>(j), type, layout.size,
                                               CopyOnHost, &inputs->tensors[divided_[j]].divisor));
    }
    return absl::OkStatus();
  }

  absl::Status Run(OpKernelContext* context) override {
    CompressInputs inputs;
    TF_RETURN_IF_ERROR(Collect(context, CopyOnHost, &inputs));
    TF_RETURN_IF_ERROR(FindDivisors(context, &inputs));
    const int64_t num = num_tensors();
    for (int64_t i = 0; i < num; ++i) {
      Tensor& tensor = inputs.tensors[i];
      tensor.scale = inputs.scales->flat<double>()(i);
      tensor.offset = inputs.offsets->flat<int32_t>()(i);
      const int64_t size = tensor.layout.size;
      if (size > 0 && (tensor.offset < 0 || tensor.offset >= size)) {
        return absl::InvalidArgumentError("An offset is not a position of its tensor.");
      }
    }
    Values* words;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {BufferWords(inputs.layout)}, &words));
    TensorFlowThreads threads(context);
    std::vector<Hint> hints = TakeHints(num);
    Compress(inputs.tensors,
             {inputs.rule, inputs.momentum, factor_masking_, fingerprint_, CurrentLevel()},
             threads, hints, reinterpret_cast<uint32_t*>(words->flat<int32_t>().data()));
    const std::lock_guard<std::mutex> lock(mutex_);
    hints_ = std::move(hints);
    return absl::OkStatus();
  }

  // Steps of a parallel loop may run at once; one of them gets the hints.
  std::vector<Hint> TakeHints(int64_t num) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Hint> taken = std::move(hints_);
    hints_.clear();
    taken.resize(num);
    return taken;
  }

  std::mutex mutex_;
  std::vector<Hint> hints_;
};

// Decodes buffers of all workers.
class DecodingKernel : public CpuKernel<WireKernel<OpKernel>> {
 public:
  using CpuKernel::CpuKernel;

 protected:
  absl::Status Decode(const std::vector<Layout>& layout, const Values& buffers, Threads& threads,
                      Decoded* decoded) const {
    if (buffers.dims() != 2) {
      return absl::InvalidArgumentError("`buffers` must have shape [workers, words].");
    }
    const auto* words = reinterpret_cast<const uint32_t*>(buffers.flat<int32_t>().data());
    const std::string wrong = decoded->Decode(layout, words, buffers.dim_size(0),
                                              buffers.dim_size(1), fingerprint_, threads);
    return wrong.empty() ? absl::OkStatus() : WrongBuffer(wrong);
  }
};

class SumKernel : public Sized<DecodingKernel> {
 public:
  using Sized::Sized;

 private:
  absl::Status Run(OpKernelContext* context) override {
    std::vector<Layout> layout;
    TF_RETURN_IF_ERROR(MakeLayout(sizes_, context->input(1), &layout));
    TensorFlowThreads threads(context);
    Decoded decoded;
    TF_RETURN_IF_ERROR(Decode(layout, context->input(0), threads, &decoded));
    Values* nonfinite;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {}, &nonfinite));
    nonfinite->scalar<int32_t>()() = decoded.num_nonfinite();
    std::vector<void*> sums;
    for (size_t i = 0; i < num_tensors(); ++i) {
      Values* sum;
      TF_RETURN_IF_ERROR(context->allocate_output(i + 1, {sizes_[i]}, &sum));
      sums.push_back(sum->data());
    }
    decoded.Sum(sums, threads);
    return absl::OkStatus();
  }
};

// Decodes buffers, and changes variables where they have entries.
class ChangeKernel : public DecodingKernel {
 public:
  using DecodingKernel::DecodingKernel;

 protected:
  // Inputs are the variables, perhaps others, `buffers` and `counts`.
  absl::Status Run(OpKernelContext* context) override {
    OpInputList handles;
    TF_RETURN_IF_ERROR(context->input_list("variables", &handles));
    if (handles.size() != int(num_tensors())) {
      return absl::InvalidArgumentError("There must be one type per variable.");
    }
    LockedVariables variables;
    TF_RETURN_IF_ERROR(variables.Lock(context, handles));
    std::vector<int64_t> sizes;
    std::vector<void*> data(num_tensors());
    for (int i = 0; i < handles.size(); ++i) sizes.push_back(variables.Size(i));
    std::vector<Layout> layout;
    const int last = context->num_inputs() - 1;
    TF_RETURN_IF_ERROR(MakeLayout(sizes, context->input(last), &layout));
    TensorFlowThreads threads(context);
    Decoded decoded;
    TF_RETURN_IF_ERROR(Decode(layout, context->input(last - 1), threads, &decoded));
    for (int i = 0; i < handles.size(); ++i) {
      TF_RETURN_IF_ERROR(variables.Writable(context, i, types_[i], sizes[i], "variable", CopyOnHost,
                                            &data[i]));
    }
    TF_RETURN_IF_ERROR(Change(context, decoded, data, threads));
    Values* nonfinite;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {}, &nonfinite));
    nonfinite->scalar<int32_t>()() = decoded.num_nonfinite();
    return absl::OkStatus();
  }

  virtual absl::Status Change(OpKernelContext* context, const Decoded& decoded,
                              const std::vector<void*>& data, Threads& threads) = 0;
};

class DescendKernel : public ChangeKernel {
 public:
  using ChangeKernel::ChangeKernel;

 private:
  absl::Status Change(OpKernelContext* context, const Decoded& decoded,
                      const std::vector<void*>& data, Threads& threads) override {
    const Values& rate = context->input(data.size());
    if (rate.NumElements() != 1) return absl::InvalidArgumentError("There must be one rate.");
    decoded.Descend(data, rate.flat<double>()(0), threads);
    return absl::OkStatus();
  }
};

class PutKernel : public ChangeKernel {
 public:
  using ChangeKernel::ChangeKernel;

 private:
  absl::Status Change(OpKernelContext* context, const Decoded& decoded,
                      const std::vector<void*>& data, Threads& threads) override {
    if (context->input(data.size()).dim_size(0) != 1) {
      return absl::InvalidArgumentError("`buffers` must be of one worker.");
    }
    decoded.Put(data, threads);
    return absl::OkStatus();
  }
};

class ApplyKernel : public DecodingKernel {
 public:
  explicit ApplyKernel(OpKernelConstruction* context) : DecodingKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
    GiveToTensorFlow();
  }
  ~ApplyKernel() override { TakeFromTensorFlow(); }

 private:
  absl::Status Run(OpKernelContext* context) override {
    const Values *buffers, *counts;
    TF_RETURN_IF_ERROR(context->input("buffers", &buffers));
    TF_RETURN_IF_ERROR(context->input("counts", &counts));
    LockedRules rules;
    TF_RETURN_IF_ERROR(rules.Lock(context, attributes_));
    std::vector<Layout> layout;
    TF_RETURN_IF_ERROR(MakeLayout(rules.sizes(), *counts, &layout));
    TensorFlowThreads threads(context);
    Decoded decoded;
    TF_RETURN_IF_ERROR(Decode(layout, *buffers, threads, &decoded));
    TF_RETURN_IF_ERROR(
        rules.Update(context, attributes_, CurrentLevel(), CopyOnHost,
                    [&](const UpdateRules& update) { decoded.Apply(update, threads); }));
    Values* nonfinite;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {}, &nonfinite));
    nonfinite->scalar<int32_t>()() = decoded.num_nonfinite();
    return absl::OkStatus();
  }

  RuleAttributes attributes_;
};

class ApplySumsKernel : public CpuKernel<OpKernel> {
 public:
  explicit ApplySumsKernel(OpKernelConstruction* context) : CpuKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
    OP_REQUIRES_OK(context, context->GetAttr("flat", &flat_));
    GiveToTensorFlow();
  }
  ~ApplySumsKernel() override { TakeFromTensorFlow(); }

 private:
  absl::Status Run(OpKernelContext* context) override {
    OpInputList inputs;
    TF_RETURN_IF_ERROR(context->input_list("sums", &inputs));
    LockedRules rules;
    TF_RETURN_IF_ERROR(rules.Lock(context, attributes_));
    std::vector<const float*> sums;
    TF_RETURN_IF_ERROR(Find(inputs, rules.sizes(), &sums));
    TensorFlowThreads threads(context);
    return rules.Update(context, attributes_, CurrentLevel(), CopyOnHost,
                       [&](const UpdateRules& update) { ApplySums(update, sums, threads); });
  }

  // Finds where the sums of each variable begin: in a tensor of its own or, behind a flag, in
  // one vector of all.
  absl::Status Find(const OpInputList& inputs, const std::vector<int64_t>& sizes,
                    std::vector<const float*>* sums) const {
    bool fits = inputs.size() == (flat_ ? 1 : int(sizes.size()));
    int64_t at = flat_ ? 1 : 0;
    for (size_t i = 0; i < sizes.size() && fits; ++i) {
      const Values& values = inputs[flat_ ? 0 : i];
      sums->push_back(values.flat<float>().data() + at);
      if (flat_) at += sizes[i];
      fits = flat_ ? at <= values.NumElements() : sizes[i] == values.NumElements();
    }
    if (fits && (!flat_ || at == inputs[0].NumElements())) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "There must be one sum per entry of the variables, and if they are flat, a flag first.");
  }

  bool flat_;
  RuleAttributes attributes_;
};

REGISTER_KERNEL_BUILDER(Name("TfDgcCompress").Device(tensorflow::DEVICE_CPU), CompressKernel);
REGISTER_KERNEL_BUILDER(Name("TfDgcSum").Device(tensorflow::DEVICE_CPU), SumKernel);
REGISTER_KERNEL_BUILDER(Name("TfDgcDescend").Device(tensorflow::DEVICE_CPU), DescendKernel);
REGISTER_KERNEL_BUILDER(Name("TfDgcPut").Device(tensorflow::DEVICE_CPU), PutKernel);
REGISTER_KERNEL_BUILDER(Name("TfDgcApply").Device(tensorflow::DEVICE_CPU), ApplyKernel);
REGISTER_KERNEL_BUILDER(Name("TfDgcApplySums").Device(tensorflow::DEVICE_CPU), ApplySumsKernel);

}  // namespace
}  // namespace tf_dgc

// For `tf-dgc doctor`: the vector code that is used on this machine.
extern "C" __attribute__((visibility("default"))) const char* tf_dgc_vector_level() {
  return tf_dgc::LevelName(tf_dgc::CurrentLevel());
}
