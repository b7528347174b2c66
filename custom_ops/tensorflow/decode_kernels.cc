// TensorFlow's side of what arrives from all workers, of native methods, on CPUs.
#include "method_kernel.h"
#include "rule_kernel.h"

namespace tf_dgc {
namespace {

// Opens buffers of all workers, and says what of them is finite.
class BuffersKernel : public MethodKernel {
 public:
  using MethodKernel::MethodKernel;

 protected:
  // Keeps what all workers remember locked.
  absl::Status Open(OpKernelContext* context, Threads& threads, LockedVariables* locked,
                    Buffers* opened) const {
    OpInputList buffers, totals;
    TF_RETURN_IF_ERROR(context->input_list("buffers", &buffers));
    TF_RETURN_IF_ERROR(context->input_list("totals", &totals));
    std::vector<Coded> tensors;
    TF_RETURN_IF_ERROR(Tensors(context, 0, &tensors));
    if (buffers.size() != int64_t(fingerprints_.size())) {
      return absl::InvalidArgumentError("There must be buffers of all rounds.");
    }
    if (buffers.size() > 1) TF_RETURN_IF_ERROR(HaveNumbers(tensors));
    std::vector<Gathered> rounds;
    for (int i = 0; i < buffers.size(); ++i) {
      if (buffers[i].dims() != 2) {
        return absl::InvalidArgumentError("`buffers` must have shape [workers, words].");
      }
      rounds.push_back({reinterpret_cast<const uint32_t*>(buffers[i].flat<int32_t>().data()),
                        buffers[i].dim_size(0), buffers[i].dim_size(1),
                        static_cast<uint32_t>(fingerprints_[i])});
    }
    std::vector<Vector> vectors;
    for (int i = 0; i < totals.size(); ++i) {
      // Those of a round have indices of their own.
      int64_t length = 1;
      for (int round = 0; round < buffers.size(); ++round) {
        length += NumSummed(tensors, i, round) - 1;
      }
      if (totals[i].NumElements() != length) {
        return absl::InvalidArgumentError("A vector is not of the length of its tensors.");
      }
      vectors.push_back(VectorOf(totals[i]));
    }
    const std::string wrong = opened->Open(tensors, rounds, vectors, CurrentLevel(), threads);
    if (!wrong.empty()) return WrongBuffer(wrong);
    return Remember(context, locked, opened);
  }

  absl::Status Remember(OpKernelContext* context, LockedVariables* locked,
                        Buffers* opened) const {
    OpInputList handles;
    TF_RETURN_IF_ERROR(context->input_list("shared", &handles));
    if (handles.size() != Count(&Method::num_shared)) {
      return absl::InvalidArgumentError("There must be what all workers remember.");
    }
    TF_RETURN_IF_ERROR(locked->Lock(context, handles));
    Shared shared(num_tensors());
    int next = 0;
    for (size_t i = 0; i < num_tensors(); ++i) {
      for (int j = 0; j < methods_[i]->num_shared; ++j, ++next) {
        void* data;
        TF_RETURN_IF_ERROR(locked->Writable(context, next, tensorflow::DT_FLOAT, sizes_[i],
                                            "state", CopyOnHost, &data));
        shared[i].push_back(static_cast<float*>(data));
      }
    }
    opened->Remember(shared);
    return absl::OkStatus();
  }

  absl::Status Answer(OpKernelContext* context, const Buffers& opened,
                      const std::vector<char>& are_finite) const {
    Values *nonfinite, *finite;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {}, &nonfinite));
    TF_RETURN_IF_ERROR(
        context->allocate_output(1, {static_cast<int64_t>(num_tensors())}, &finite));
    nonfinite->scalar<int32_t>()() = opened.num_nonfinite();
    for (size_t i = 0; i < num_tensors(); ++i) finite->flat<bool>()(i) = are_finite[i] != 0;
    return GiveBack(context, 2, opened.Norms(methods_));
  }
};

class DecodeKernel : public BuffersKernel {
 public:
  using BuffersKernel::BuffersKernel;

 private:
  absl::Status Run(OpKernelContext* context) override {
    TensorFlowThreads threads(context);
    LockedVariables locked;
    Buffers opened;
    TF_RETURN_IF_ERROR(Open(context, threads, &locked, &opened));
    std::vector<float*> sums;
    for (size_t i = 0; i < num_tensors(); ++i) {
      Values* sum;
      TF_RETURN_IF_ERROR(context->allocate_output(i + 3, {sizes_[i]}, &sum));
      sums.push_back(sum->flat<float>().data());
    }
    return Answer(context, opened, opened.Sum(sums, threads));
  }
};

class DecodeApplyKernel : public BuffersKernel {
 public:
  explicit DecodeApplyKernel(OpKernelConstruction* context) : BuffersKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
    GiveToTensorFlow();
  }

 private:
  absl::Status Run(OpKernelContext* context) override {
    TensorFlowThreads threads(context);
    LockedVariables locked;
    Buffers opened;
    TF_RETURN_IF_ERROR(Open(context, threads, &locked, &opened));
    LockedRules rules;
    TF_RETURN_IF_ERROR(rules.Lock(context, attributes_));
    if (rules.sizes() != sizes_) {
      return absl::InvalidArgumentError("A variable is not of the size of its tensor.");
    }
    const std::vector<char> finite = opened.AreFinite(threads);
    if (std::all_of(finite.begin(), finite.end(), [](char is) { return is; })) {
      TF_RETURN_IF_ERROR(
          rules.Update(context, attributes_, CurrentLevel(), CopyOnHost,
                      [&](const UpdateRules& update) {
                        opened.ForEachPart(threads, [&](size_t t, int64_t begin, int64_t end,
                                                        const float* sums) {
                          update.Apply(t, begin, end, sums);
                        });
                      }));
    }
    return Answer(context, opened, finite);
  }

  RuleAttributes attributes_;
};

REGISTER_KERNEL_BUILDER(Name("TfDgcDecode").Device(tensorflow::DEVICE_CPU), DecodeKernel);
REGISTER_KERNEL_BUILDER(Name("TfDgcDecodeApply").Device(tensorflow::DEVICE_CPU),
                        DecodeApplyKernel);

}  // namespace
}  // namespace tf_dgc
