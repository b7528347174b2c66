// TensorFlow's side of the CUDA kernels: its stream, its allocator, errors without waiting.
#include <cuda_runtime_api.h>

#include <string>
#include <utility>
#include <vector>

#include "gpu_stream.h"
#include "wire_kernel.h"

namespace tf_dgc {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;

absl::Status RefuseFloat64(const std::vector<Layout>& layout) {
  for (const Layout& tensor : layout) {
    if (tensor.wide) {
      return absl::UnimplementedError("float64 tensors have no CUDA kernel in tf_dgc.");
    }
  }
  return absl::OkStatus();
}

TfDgcTensor Describe(const Layout& layout) {
  return {layout.size, layout.k, nullptr, nullptr, nullptr, 0,
          static_cast<int32_t>(layout.value_type), 0, nullptr, nullptr};
}

class CompressKernel : public CompressBase {
 public:
  using CompressBase::CompressBase;

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(context, Guarded([&] { return Run(context); }));
  }

 private:
  absl::Status Run(OpKernelContext* context) {
    const cudaStream_t stream = StreamOf(context);
    CompressInputs inputs;
    TF_RETURN_IF_ERROR(Collect(context, Copier{stream}, &inputs));
    TF_RETURN_IF_ERROR(RefuseFloat64(inputs.layout));
    std::vector<TfDgcTensor> tensors;
    for (const Tensor& tensor : inputs.tensors) {
      if (tensor.rows.sparse) {
        return absl::UnimplementedError("Sparse gradients have no CUDA kernel in tf_dgc.");
      }
      TfDgcTensor described = Describe(tensor.layout);
      described.gradient = tensor.gradient;
      described.velocity = static_cast<float*>(tensor.velocity);
      described.residual = static_cast<float*>(tensor.residual);
      described.gradient_type = static_cast<int32_t>(tensor.gradient_type);
      described.largest = static_cast<float>(tensor.largest);
      tensors.push_back(described);
    }
    for (size_t j = 0; j < divided_.size(); ++j) {
      TfDgcTensor& described = tensors[divided_[j]];
      void* moment = nullptr;
      TF_RETURN_IF_ERROR(inputs.divisors.FindMoment(context, static_cast<int>(j),
                                                    tensorflow::DT_FLOAT, described.size,
                                                    Copier{stream}, &moment));
      described.moment = static_cast<float*>(moment);
      described.divisor = inputs.divisors.numbers(static_cast<int>(j));
    }
    const int num = static_cast<int>(tensors.size());
    Values workspace;
    TF_RETURN_IF_ERROR(AllocateBytes(
        context, tf_dgc_cuda_compress_workspace(tensors.data(), num), &workspace));
    Values* words;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {BufferWords(inputs.layout)}, &words));
    TfDgcHint* hints = nullptr;
    TF_RETURN_IF_ERROR(GetHints(context, stream, num, &hints));
    const TfDgcSettings settings{static_cast<int32_t>(inputs.rule), factor_masking_,
                                 static_cast<float>(inputs.momentum), fingerprint_};
    return Queued(tf_dgc_cuda_compress(
        stream, tensors.data(), num, &settings, inputs.scales->flat<double>().data(),
        inputs.offsets->flat<int32_t>().data(), hints, workspace.data(),
        reinterpret_cast<uint32_t*>(words->flat<int32_t>().data())));
  }

  // The kernels of a device share one stream, so one step's hints are written before the
  // next one's are read.
  absl::Status GetHints(OpKernelContext* context, cudaStream_t stream, int num,
                        TfDgcHint** hints) {
    const tensorflow::mutex_lock lock(mutex_);
    if (hints_.NumElements() == 0) {
      TF_RETURN_IF_ERROR(AllocateBytes(context, num * sizeof(TfDgcHint), &hints_));
      TF_RETURN_IF_ERROR(Queued(cudaMemsetAsync(hints_.data(), 0, hints_.TotalBytes(), stream)));
    }
    *hints = static_cast<TfDgcHint*>(hints_.data());
    return absl::OkStatus();
  }

  tensorflow::mutex mutex_;
  Values hints_;
};

// Decodes buffers of all workers. Whether they were right is known on the host only when
// the device has come so far, and no thread waits for that.
class DecodingKernel : public WireKernel<AsyncOpKernel> {
 public:
  using WireKernel::WireKernel;

 protected:
  // Queues everything; calls `done` later. `rate` is null for sums.
  absl::Status Decode(OpKernelContext* context, const std::vector<Layout>& layout,
                      const Values& buffers, const std::vector<float*>& targets,
                      const double* rate, DoneCallback done) const {
    if (buffers.dims() != 2) {
      return absl::InvalidArgumentError("`buffers` must have shape [workers, words].");
    }
    TF_RETURN_IF_ERROR(RefuseFloat64(layout));
    const cudaStream_t stream = StreamOf(context);
    std::vector<TfDgcTensor> tensors;
    for (const Layout& tensor : layout) tensors.push_back(Describe(tensor));
    const int num = static_cast<int>(tensors.size());
    const int num_workers = static_cast<int>(buffers.dim_size(0));
    Values workspace, status;
    TF_RETURN_IF_ERROR(AllocateBytes(
        context, tf_dgc_cuda_decode_workspace(tensors.data(), num, num_workers), &workspace));
    TF_RETURN_IF_ERROR(AllocateBytes(context, sizeof(TfDgcStatus), &status));
    Values* nonfinite;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {}, &nonfinite));
    if (buffers.dim_size(1) != BufferWords(layout)) {
      return WrongBuffer(absl::StrCat("The buffers have ", buffers.dim_size(1),
                                      " words; expected are ", BufferWords(layout)));
    }
    TF_RETURN_IF_ERROR(Queued(tf_dgc_cuda_decode(
        stream, tensors.data(), num, fingerprint_,
        reinterpret_cast<const uint32_t*>(buffers.flat<int32_t>().data()), num_workers,
        buffers.dim_size(1), targets.data(), rate, workspace.data(),
        static_cast<TfDgcStatus*>(status.data()))));
    return AnswerLater(context, status, nonfinite, std::move(done));
  }
};

class SumKernel : public DecodingKernel {
 public:
  explicit SumKernel(OpKernelConstruction* context) : DecodingKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("sizes", &sizes_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    EndIfWrong(context, Guarded([&] { return Queue(context, done); }), done);
  }

 private:
  absl::Status Queue(OpKernelContext* context, DoneCallback done) const {
    std::vector<Layout> layout;
    TF_RETURN_IF_ERROR(MakeLayout(sizes_, context->input(1), &layout));
    TF_RETURN_IF_ERROR(RefuseFloat64(layout));
    std::vector<float*> sums;
    TF_RETURN_IF_ERROR(AllocateSums(context, 1, sizes_, &sums));
    return Decode(context, layout, context->input(0), sums, nullptr, std::move(done));
  }

  std::vector<int64_t> sizes_;
};

class DescendKernel : public DecodingKernel {
 public:
  using DecodingKernel::DecodingKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    EndIfWrong(context, Guarded([&] { return Queue(context, done); }), done);
  }

 private:
  absl::Status Queue(OpKernelContext* context, DoneCallback done) const {
    OpInputList handles;
    TF_RETURN_IF_ERROR(context->input_list("variables", &handles));
    const int num = handles.size();
    const Values& rate = context->input(num);
    if (rate.NumElements() != 1 || num != static_cast<int>(num_tensors())) {
      return absl::InvalidArgumentError("There must be one rate, and one type per variable.");
    }
    LockedVariables variables;
    TF_RETURN_IF_ERROR(variables.Lock(context, handles));
    std::vector<int64_t> sizes;
    for (int i = 0; i < num; ++i) sizes.push_back(variables.Size(i));
    std::vector<Layout> layout;
    TF_RETURN_IF_ERROR(MakeLayout(sizes, context->input(num + 2), &layout));
    std::vector<float*> data;
    for (int i = 0; i < num; ++i) {
      void* memory = nullptr;
      TF_RETURN_IF_ERROR(variables.Writable(context, i, types_[i], sizes[i], "variable",
                                            Copier{StreamOf(context)}, &memory));
      data.push_back(static_cast<float*>(memory));
    }
    return Decode(context, layout, context->input(num + 1), data, rate.flat<double>().data(),
                  std::move(done));
  }
};

REGISTER_KERNEL_BUILDER(Name("TfDgcCompress")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("velocity")
                            .HostMemory("residual")
                            .HostMemory("momentum")
                            .HostMemory("counts")
                            .HostMemory("rows")
                            .HostMemory("moments"),
                        CompressKernel);
REGISTER_KERNEL_BUILDER(Name("TfDgcSum")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("counts")
                            .HostMemory("nonfinite"),
                        SumKernel);
REGISTER_KERNEL_BUILDER(Name("TfDgcDescend")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("variables")
                            .HostMemory("counts")
                            .HostMemory("nonfinite"),
                        DescendKernel);

}  // namespace
}  // namespace tf_dgc

// Why the kernels cannot run on this machine, or NULL.
extern "C" __attribute__((visibility("default"))) const char* tf_dgc_cuda_problem() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return count > 0 ? nullptr : "there is no GPU";
}
