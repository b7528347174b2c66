// TensorFlow's side of what native methods send, on CPUs.
#include "divisors.h"
#include "method_kernel.h"
#include "sparse_rows.h"

namespace tf_dgc {
namespace {

class EncodeKernel : public MethodKernel {
 public:
  explicit EncodeKernel(OpKernelConstruction* context) : MethodKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("T", &types_));
    OP_REQUIRES_OK(context, context->GetAttr("nesterov", &nesterov_));
    OP_REQUIRES_OK(context, context->GetAttr("factor_masking", &factor_masking_));
    OP_REQUIRES_OK(context, context->GetAttr("round", &round_));
    OP_REQUIRES_OK(context, context->GetAttr("divided", &divided_));
    OP_REQUIRES_OK(context, context->GetAttr("sparse", &sparse_));
    OP_REQUIRES(context, round_ < int64_t(fingerprints_.size()),
                absl::InvalidArgumentError("There is no such round."));
    GiveToTensorFlow();
  }

 private:
  absl::Status Run(OpKernelContext* context) override {
    OpInputList gradients, velocity, residual, states;
    TF_RETURN_IF_ERROR(context->input_list("gradients", &gradients));
    TF_RETURN_IF_ERROR(context->input_list("velocity", &velocity));
    TF_RETURN_IF_ERROR(context->input_list("residual", &residual));
    TF_RETURN_IF_ERROR(context->input_list("states", &states));
    const Values *momentum, *scales, *worker;
    TF_RETURN_IF_ERROR(context->input("momentum", &momentum));
    TF_RETURN_IF_ERROR(context->input("scales", &scales));
    TF_RETURN_IF_ERROR(context->input("worker", &worker));
    const int num = num_tensors();
    if (scales->NumElements() != num || (velocity.size() > 0 && velocity.size() != num) ||
        (residual.size() > 0 && residual.size() != num) ||
        (velocity.size() > 0 && residual.size() == 0) ||
        states.size() != Count(&Method::num_states)) {
      return absl::InvalidArgumentError(
          "There must be one scale per tensor, one residual per tensor or none, one velocity "
          "per residual or none, and the states of each tensor's method.");
    }
    std::vector<Rows> rows;
    const auto size_of = [&](int64_t i) { return sizes_[i]; };
    TF_RETURN_IF_ERROR(FindRows(context, sparse_, gradients, size_of, &rows));
    LockedVariables locked_velocity, locked_residual, locked_states;
    TF_RETURN_IF_ERROR(locked_velocity.Lock(context, velocity));
    TF_RETURN_IF_ERROR(locked_residual.Lock(context, residual));
    TF_RETURN_IF_ERROR(locked_states.Lock(context, states));
    const auto memory = [&](LockedVariables& variables, int at, int64_t size, const char* what,
                            float** data) {
      void* found = nullptr;
      TF_RETURN_IF_ERROR(variables.Writable(context, at, tensorflow::DT_FLOAT, size, what,
                                            CopyOnHost, &found));
      *data = static_cast<float*>(found);
      return absl::OkStatus();
    };
    std::vector<Source> sources;
    for (int i = 0, state = 0; i < num; ++i) {
      if (!rows[i].sparse && gradients[i].NumElements() != sizes_[i]) {
        return absl::InvalidArgumentError("A gradient is not of the size of its tensor.");
      }
      Source source{sizes_[i],     GradientTypeOf(types_[i]), gradients[i].data(),
                    static_cast<float>(scales->flat<double>()(i)),
                    Rule::kNone,   0,
                    nullptr,       nullptr,                   {},
                    factor_masking_};
      source.rows = rows[i];
      if (velocity.size() > 0) {
        source.rule = nesterov_ ? Rule::kNesterov : Rule::kMomentum;
        source.momentum = static_cast<float>(momentum->scalar<double>()());
        TF_RETURN_IF_ERROR(memory(locked_velocity, i, sizes_[i], "velocity", &source.velocity));
      }
      if (residual.size() > 0) {
        TF_RETURN_IF_ERROR(memory(locked_residual, i, sizes_[i], "residual", &source.residual));
      }
      for (int j = 0; j < methods_[i]->num_states; ++j, ++state) {
        source.states.emplace_back();
        TF_RETURN_IF_ERROR(
            memory(locked_states, state, sizes_[i], "state", &source.states.back()));
      }
      sources.push_back(source);
    }
    LockedDivisors divisors;
    TF_RETURN_IF_ERROR(divisors.Lock(context, divided_));
    for (size_t j = 0; j < divided_.size(); ++j) {
      const int64_t i = divided_[j];
      if (i < 0 || i >= num || residual.size() == 0) {
        return absl::InvalidArgumentError("There is no such gradient to be divided, or to wait.");
      }
      TF_RETURN_IF_ERROR(divisors.Find(context, static_cast<int>(j), tensorflow::DT_FLOAT,
                                       sizes_[i], CopyOnHost, &sources[i].divisor));
    }
    std::vector<Coded> tensors;
    TF_RETURN_IF_ERROR(Tensors(context, worker->scalar<int32_t>()(), &tensors));
    if (round_ > 0) TF_RETURN_IF_ERROR(HaveNumbers(tensors));
    Values *finite, *entries, *words;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {}, &finite));
    TF_RETURN_IF_ERROR(context->allocate_output(1, {}, &entries));
    TF_RETURN_IF_ERROR(context->allocate_output(2, {NumWords(tensors, round_)}, &words));
    std::vector<Values*> sent(vector_types_.size());
    std::vector<Vector> vectors;
    for (size_t i = 0; i < sent.size(); ++i) {
      const int at = static_cast<int>(i);
      const int64_t length = NumSummed(tensors, at, round_);
      TF_RETURN_IF_ERROR(context->allocate_output(4 + at, {length}, &sent[i]));
      vectors.push_back(VectorOf(*sent[i]));
    }
    TensorFlowThreads threads(context);
    const Encoded encoded =
        Encode(tensors, sources, static_cast<uint32_t>(fingerprints_[round_]), CurrentLevel(),
               threads, reinterpret_cast<uint32_t*>(words->flat<int32_t>().data()), vectors,
               round_);
    TF_RETURN_IF_ERROR(GiveBack(context, 3, encoded.notes));
    finite->scalar<bool>()() = encoded.all_taken;
    entries->scalar<int64_t>()() = encoded.entries;
    for (Values* vector : sent) SetFlag(!encoded.all_taken, vector);
    return absl::OkStatus();
  }

  static void SetFlag(bool flag, Values* vector) {
    const float number = flag ? 1 : 0;
    if (vector->dtype() == tensorflow::DT_FLOAT) {
      vector->flat<float>()(0) = number;
    } else if (vector->dtype() == tensorflow::DT_HALF) {
      vector->flat<Eigen::half>()(0) = Eigen::half(number);
    } else {
      vector->flat<tensorflow::bfloat16>()(0) = tensorflow::bfloat16(number);
    }
  }

  tensorflow::DataTypeVector types_;
  bool nesterov_, factor_masking_;
  int round_;
  std::vector<int64_t> divided_, sparse_;
};

REGISTER_KERNEL_BUILDER(Name("TfDgcEncode").Device(tensorflow::DEVICE_CPU), EncodeKernel);

}  // namespace
}  // namespace tf_dgc
