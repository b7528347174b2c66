// TensorFlow's side of the engine's CUDA kernels.
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "divisors.h"
#include "gpu_stream.h"
#include "method_kernel.h"

namespace tf_dgc {
namespace {

// The tensors of a step as the kernels are told of them.
template <class Base>
class CodedKernel : public MethodAttributes<Base> {
 public:
  using MethodAttributes<Base>::MethodAttributes;

 protected:
  absl::Status Describe(std::vector<TfDgcCoded>* tensors) const {
    for (size_t i = 0; i < this->num_tensors(); ++i) {
      TfDgcCoded tensor{};
      tensor.method = this->names_[i].c_str();
      tensor.parameters = this->parameters_[i].data();
      tensor.num_parameters = static_cast<int32_t>(this->parameters_[i].size());
      tensor.vector = static_cast<int32_t>(this->vectors_[i]);
      tensor.size = this->sizes_[i];
      tensor.columns = this->columns_[i];
      tensor.index = static_cast<int32_t>(this->indices_[i]);
      tensors->push_back(tensor);
    }
    const int num = static_cast<int>(tensors->size());
    const bool are_known = tf_dgc_cuda_engine_words(tensors->data(), num) >= 0;
    if (are_known && this->fingerprints_.size() == 1) return absl::OkStatus();
    return absl::UnimplementedError("A method has no CUDA kernel in tf_dgc.");
  }

  static TfDgcVector VectorOf(const Values& values) {
    return {values.data(), static_cast<int32_t>(GradientTypeOf(values.dtype()))};
  }

  uint32_t fingerprint() const { return static_cast<uint32_t>(this->fingerprints_[0]); }
};

class EncodeKernel : public CodedKernel<OpKernel> {
 public:
  explicit EncodeKernel(OpKernelConstruction* context) : CodedKernel(context) {
    std::vector<int64_t> sparse;
    OP_REQUIRES_OK(context, context->GetAttr("T", &types_));
    OP_REQUIRES_OK(context, context->GetAttr("nesterov", &nesterov_));
    OP_REQUIRES_OK(context, context->GetAttr("divided", &divided_));
    OP_REQUIRES_OK(context, context->GetAttr("sparse", &sparse));
    OP_REQUIRES(context, sparse.empty(),
                absl::UnimplementedError("Sparse gradients have no CUDA kernel in tf_dgc."));
  }

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(context, Guarded([&] { return Run(context); }));
  }

 private:
  absl::Status Run(OpKernelContext* context) const {
    std::vector<TfDgcCoded> tensors;
    TF_RETURN_IF_ERROR(Describe(&tensors));
    LockedVariables velocity, residual;
    TF_RETURN_IF_ERROR(Gradients(context, &tensors));
    TF_RETURN_IF_ERROR(Memory(context, "velocity", &TfDgcCoded::velocity, &velocity, &tensors));
    TF_RETURN_IF_ERROR(Memory(context, "residual", &TfDgcCoded::residual, &residual, &tensors));
    LockedDivisors divisors;
    TF_RETURN_IF_ERROR(Divisors(context, &divisors, &tensors));
    const int num = static_cast<int>(tensors.size());
    Values *finite, *words, workspace;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {}, &finite));
    const int64_t num_words = tf_dgc_cuda_engine_words(tensors.data(), num);
    TF_RETURN_IF_ERROR(context->allocate_output(2, {num_words}, &words));
    std::vector<TfDgcVector> vectors;
    TF_RETURN_IF_ERROR(Outputs(context, tensors, &vectors));
    TF_RETURN_IF_ERROR(AllocateBytes(
        context, tf_dgc_cuda_encode_workspace(tensors.data(), num), &workspace));
    TfDgcCoding coding;
    const Values *scales, *iteration;
    TF_RETURN_IF_ERROR(context->input("scales", &scales));
    TF_RETURN_IF_ERROR(context->input("iteration", &iteration));
    TF_RETURN_IF_ERROR(Settings(context, &coding));
    if (scales->NumElements() != num) {
      return absl::InvalidArgumentError("There must be one scale per tensor.");
    }
    return Queued(tf_dgc_cuda_encode(
        StreamOf(context), tensors.data(), num, &coding, scales->flat<double>().data(),
        iteration->flat<int64_t>().data(), vectors.data(), static_cast<int>(vectors.size()),
        workspace.data(), reinterpret_cast<uint32_t*>(words->flat<int32_t>().data()),
        reinterpret_cast<uint8_t*>(finite->flat<bool>().data())));
  }

  absl::Status Settings(OpKernelContext* context, TfDgcCoding* coding) const {
    OpInputList velocity;
    const Values *momentum, *worker;
    TF_RETURN_IF_ERROR(context->input_list("velocity", &velocity));
    TF_RETURN_IF_ERROR(context->input("momentum", &momentum));
    TF_RETURN_IF_ERROR(context->input("worker", &worker));
    const Rule rule = velocity.size() == 0 ? Rule::kNone
                      : nesterov_          ? Rule::kNesterov
                                           : Rule::kMomentum;
    *coding = {static_cast<int32_t>(rule), static_cast<float>(momentum->scalar<double>()()),
               fingerprint(), worker->scalar<int32_t>()(), seed_};
    return absl::OkStatus();
  }

  absl::Status Gradients(OpKernelContext* context, std::vector<TfDgcCoded>* tensors) const {
    OpInputList gradients;
    TF_RETURN_IF_ERROR(context->input_list("gradients", &gradients));
    for (size_t i = 0; i < tensors->size(); ++i) {
      if (gradients[i].NumElements() != sizes_[i]) {
        return absl::InvalidArgumentError("A gradient is not of the size of its tensor.");
      }
      (*tensors)[i].gradient = gradients[i].data();
      (*tensors)[i].gradient_type = static_cast<int32_t>(GradientTypeOf(types_[i]));
    }
    return absl::OkStatus();
  }

  // Of variables, one per tensor or none, which stay locked.
  absl::Status Memory(OpKernelContext* context, const char* name, float* TfDgcCoded::*memory,
                      LockedVariables* locked, std::vector<TfDgcCoded>* tensors) const {
    OpInputList handles;
    TF_RETURN_IF_ERROR(context->input_list(name, &handles));
    if (handles.size() != 0 && handles.size() != int64_t(tensors->size())) {
      return absl::InvalidArgumentError("There must be one variable per tensor, or none.");
    }
    TF_RETURN_IF_ERROR(locked->Lock(context, handles));
    for (int i = 0; i < handles.size(); ++i) {
      void* data;
      TF_RETURN_IF_ERROR(locked->Writable(context, i, tensorflow::DT_FLOAT, sizes_[i], name,
                                          Copier{StreamOf(context)}, &data));
      (*tensors)[i].*memory = static_cast<float*>(data);
    }
    return absl::OkStatus();
  }

  // Moments, which stay locked, and where their numbers are on the device.
  absl::Status Divisors(OpKernelContext* context, LockedDivisors* locked,
                        std::vector<TfDgcCoded>* tensors) const {
    TF_RETURN_IF_ERROR(locked->Lock(context, divided_));
    for (size_t j = 0; j < divided_.size(); ++j) {
      const int64_t i = divided_[j];
      if (i < 0 || i >= int64_t(tensors->size()) || (*tensors)[i].residual == nullptr) {
        return absl::InvalidArgumentError("There is no such gradient to be divided, or to wait.");
      }
      void* moment = nullptr;
      TF_RETURN_IF_ERROR(locked->FindMoment(context, static_cast<int>(j), tensorflow::DT_FLOAT,
                                            sizes_[i], Copier{StreamOf(context)}, &moment));
      (*tensors)[i].moment = static_cast<float*>(moment);
      (*tensors)[i].divisor = locked->numbers(static_cast<int>(j));
    }
    return absl::OkStatus();
  }

  // What is known without the device, and vectors.
  absl::Status Outputs(OpKernelContext* context, const std::vector<TfDgcCoded>& tensors,
                       std::vector<TfDgcVector>* vectors) const {
    Values* entries;
    TF_RETURN_IF_ERROR(context->allocate_output(1, {}, &entries));
    entries->scalar<int64_t>()() = std::accumulate(sizes_.begin(), sizes_.end(), int64_t{0});
    TF_RETURN_IF_ERROR(GiveBack(context, 3, {}));
    for (int i = 0; i < int64_t(vector_types_.size()); ++i) {
      Values* sent;
      const int64_t numbers =
          tf_dgc_cuda_engine_numbers(tensors.data(), static_cast<int>(tensors.size()), i);
      TF_RETURN_IF_ERROR(context->allocate_output(4 + i, {numbers}, &sent));
      vectors->push_back(VectorOf(*sent));
    }
    return absl::OkStatus();
  }

  tensorflow::DataTypeVector types_;
  std::vector<int64_t> divided_;
  bool nesterov_;
};

// Whether buffers were right is known on the host only when the device has come so far.
class DecodeKernel : public CodedKernel<AsyncOpKernel> {
 public:
  using CodedKernel::CodedKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    EndIfWrong(context, Guarded([&] { return Queue(context, done); }), done);
  }

 private:
  absl::Status Queue(OpKernelContext* context, DoneCallback done) const {
    OpInputList buffers, totals;
    TF_RETURN_IF_ERROR(context->input_list("buffers", &buffers));
    TF_RETURN_IF_ERROR(context->input_list("totals", &totals));
    std::vector<TfDgcCoded> tensors;
    TF_RETURN_IF_ERROR(Describe(&tensors));
    const int num = static_cast<int>(tensors.size());
    std::vector<TfDgcVector> vectors;
    for (int i = 0; i < totals.size(); ++i) {
      if (totals[i].NumElements() != tf_dgc_cuda_engine_numbers(tensors.data(), num, i)) {
        return absl::InvalidArgumentError("A vector is not of the length of its tensors.");
      }
      vectors.push_back(VectorOf(totals[i]));
    }
    if (buffers.size() != 1 || buffers[0].dims() != 2) {
      return absl::InvalidArgumentError("`buffers` must have shape [workers, words].");
    }
    Values *nonfinite, *finite, status, workspace;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {}, &nonfinite));
    TF_RETURN_IF_ERROR(context->allocate_output(1, {num}, &finite));
    TF_RETURN_IF_ERROR(GiveBack(context, 2, {}));
    std::vector<float*> sums;
    TF_RETURN_IF_ERROR(AllocateSums(context, 3, sizes_, &sums));
    const int num_workers = static_cast<int>(buffers[0].dim_size(0));
    TF_RETURN_IF_ERROR(AllocateBytes(
        context, tf_dgc_cuda_sum_workspace(tensors.data(), num, num_workers), &workspace));
    TF_RETURN_IF_ERROR(AllocateBytes(context, sizeof(TfDgcStatus), &status));
    const char* wrong = tf_dgc_cuda_sum(
        StreamOf(context), tensors.data(), num, fingerprint(),
        reinterpret_cast<const uint32_t*>(buffers[0].flat<int32_t>().data()), num_workers,
        buffers[0].dim_size(1), vectors.data(), static_cast<int>(vectors.size()), sums.data(),
        nullptr, reinterpret_cast<uint8_t*>(finite->flat<bool>().data()), workspace.data(),
        static_cast<TfDgcStatus*>(status.data()));
    if (wrong != nullptr) return WrongBuffer(absl::StrCat("Decoding: ", wrong));
    return AnswerLater(context, status, nonfinite, std::move(done));
  }
};

REGISTER_KERNEL_BUILDER(Name("TfDgcEncode")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("velocity")
                            .HostMemory("residual")
                            .HostMemory("states")
                            .HostMemory("rows")
                            .HostMemory("moments")
                            .HostMemory("momentum")
                            .HostMemory("numbers")
                            .HostMemory("worker")
                            .HostMemory("entries")
                            .HostMemory("notes"),
                        EncodeKernel);
REGISTER_KERNEL_BUILDER(Name("TfDgcDecode")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("numbers")
                            .HostMemory("shared")
                            .HostMemory("nonfinite")
                            .HostMemory("norms"),
                        DecodeKernel);

}  // namespace
}  // namespace tf_dgc
