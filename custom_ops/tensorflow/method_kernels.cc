// TensorFlow's side of the native methods, on CPUs.
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "engine.h"
#include "guard.h"
#include "rule_kernel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "threads.h"
#include "types.h"
#include "variables.h"

namespace tf_dgc {
namespace {

using tensorflow::DataTypeSize;
using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
// Not those of tf_dgc.
using Values = tensorflow::Tensor;

// What both operations know of the tensors.
class MethodKernel : public OpKernel {
 public:
  explicit MethodKernel(OpKernelConstruction* context) : OpKernel(context) {
    std::vector<std::string> names, firsts;
    std::vector<int64_t> num_parameters;
    std::vector<float> parameters;
    OP_REQUIRES_OK(context, context->GetAttr("methods", &names));
    OP_REQUIRES_OK(context, context->GetAttr("num_parameters", &num_parameters));
    OP_REQUIRES_OK(context, context->GetAttr("parameters", &parameters));
    OP_REQUIRES_OK(context, context->GetAttr("sizes", &sizes_));
    OP_REQUIRES_OK(context, context->GetAttr("columns", &columns_));
    OP_REQUIRES_OK(context, context->GetAttr("vectors", &vectors_));
    OP_REQUIRES_OK(context, context->GetAttr("V", &vector_types_));
    OP_REQUIRES_OK(context, context->GetAttr("indices", &indices_));
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed_));
    OP_REQUIRES_OK(context, context->GetAttr("fingerprints", &fingerprints_));
    OP_REQUIRES_OK(context, context->GetAttr("firsts", &firsts));
    OP_REQUIRES_OK(context, context->GetAttr("num_numbers", &num_numbers_));
    const size_t num = names.size();
    OP_REQUIRES(context,
                num_parameters.size() == num && sizes_.size() == num && columns_.size() == num &&
                    vectors_.size() == num && indices_.size() == num && firsts.size() == num &&
                    num_numbers_.size() == num && !fingerprints_.empty() &&
                    fingerprints_.size() <= 2,
                absl::InvalidArgumentError("There must be one of each attribute per tensor."));
    auto next = parameters.begin();
    for (size_t i = 0; i < num; ++i) {
      methods_.push_back(FindMethod(names[i]));
      OP_REQUIRES(context, methods_[i] != nullptr && parameters.end() - next >= num_parameters[i],
                  absl::InvalidArgumentError("There is no native method of this name, or too "
                                             "few parameters of it: " +
                                             names[i]));
      firsts_.push_back(FindMethod(firsts[i]));
      OP_REQUIRES(context, firsts[i].empty() == (firsts_[i] == nullptr),
                  absl::InvalidArgumentError("There is no such method: " + firsts[i]));
      OP_REQUIRES(context, vectors_[i] >= -1 && vectors_[i] < int64_t(vector_types_.size()),
                  absl::InvalidArgumentError("There is no such vector."));
      parameters_.emplace_back(next, next + num_parameters[i]);
      next += num_parameters[i];
    }
    GiveToTensorFlow();
  }
  ~MethodKernel() override { TakeFromTensorFlow(); }

  void Compute(OpKernelContext* context) override {
    const Called called;
    OP_REQUIRES_OK(context, Guarded([&] { return Run(context); }));
  }

 protected:
  virtual absl::Status Run(OpKernelContext* context) = 0;

  size_t num_tensors() const { return sizes_.size(); }

  // `numbers`, of all tensors one after the other, may be missing in the first round.
  absl::Status Tensors(OpKernelContext* context, int32_t worker,
                       std::vector<Coded>* tensors) const {
    const Values *iteration, *numbers;
    TF_RETURN_IF_ERROR(context->input("iteration", &iteration));
    TF_RETURN_IF_ERROR(context->input("numbers", &numbers));
    const int64_t expected = std::accumulate(num_numbers_.begin(), num_numbers_.end(), int64_t{0});
    const float* next = numbers->flat<float>().data();
    const bool are_known = numbers->NumElements() > 0;
    if (are_known && numbers->NumElements() != expected) {
      return absl::InvalidArgumentError("There must be the numbers that each method takes.");
    }
    for (size_t i = 0; i < num_tensors(); ++i) {
      const Draw draw(seed_, iteration->scalar<int64_t>()(), static_cast<int32_t>(indices_[i]),
                      worker);
      const int64_t count = are_known ? num_numbers_[i] : 0;
      tensors->push_back(
          {methods_[i],
           {sizes_[i], columns_[i], parameters_[i], draw, std::vector<float>(next, next + count)},
           static_cast<int>(vectors_[i]),
           firsts_[i]});
      next += count;
    }
    return absl::OkStatus();
  }

  // Of all tensors' methods.
  int Count(int Method::*what) const {
    int count = 0;
    for (const Method* method : methods_) count += method->*what;
    return count;
  }

  // Numbers are known from the second round on.
  absl::Status HaveNumbers(const std::vector<Coded>& tensors) const {
    for (size_t i = 0; i < num_tensors(); ++i) {
      if (int64_t(tensors[i].setup.numbers.size()) != num_numbers_[i]) {
        return absl::InvalidArgumentError("There must be the numbers that each method takes.");
      }
    }
    return absl::OkStatus();
  }

  static Vector VectorOf(const Values& values) {
    return {static_cast<char*>(values.data()), DataTypeSize(values.dtype())};
  }

  std::vector<const Method*> methods_;
  std::vector<std::vector<float>> parameters_;
  std::vector<const Method*> firsts_;  // null where there is one round
  std::vector<int64_t> sizes_, columns_, indices_, vectors_, num_numbers_, fingerprints_;
  tensorflow::DataTypeVector vector_types_;
  int64_t seed_;
};

class EncodeKernel : public MethodKernel {
 public:
  explicit EncodeKernel(OpKernelConstruction* context) : MethodKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("T", &types_));
    OP_REQUIRES_OK(context, context->GetAttr("nesterov", &nesterov_));
    OP_REQUIRES_OK(context, context->GetAttr("factor_masking", &factor_masking_));
    OP_REQUIRES_OK(context, context->GetAttr("round", &round_));
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
        (velocity.size() > 0 && residual.size() == 0) || states.size() != Count(&Method::num_states)) {
      return absl::InvalidArgumentError(
          "There must be one scale per tensor, one residual per tensor or none, one velocity "
          "per residual or none, and the states of each tensor's method.");
    }
    LockedVariables locked_velocity, locked_residual, locked_states;
    TF_RETURN_IF_ERROR(locked_velocity.Lock(context, velocity));
    TF_RETURN_IF_ERROR(locked_residual.Lock(context, residual));
    TF_RETURN_IF_ERROR(locked_states.Lock(context, states));
    const auto memory = [&](LockedVariables& variables, int at, int64_t size, const char* what,
                            float** data) {
      void* found;
      TF_RETURN_IF_ERROR(variables.Writable(context, at, tensorflow::DT_FLOAT, size, what,
                                            CopyOnHost, &found));
      *data = static_cast<float*>(found);
      return absl::OkStatus();
    };
    std::vector<Source> sources;
    for (int i = 0, state = 0; i < num; ++i) {
      if (gradients[i].NumElements() != sizes_[i]) {
        return absl::InvalidArgumentError("A gradient is not of the size of its tensor.");
      }
      Source source{sizes_[i],     GradientTypeOf(types_[i]), gradients[i].data(),
                    static_cast<float>(scales->flat<double>()(i)),
                    Rule::kNone,   0,
                    nullptr,       nullptr,                   {},
                    factor_masking_};
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
      TF_RETURN_IF_ERROR(context->allocate_output(3 + at, {NumSummed(tensors, at)}, &sent[i]));
      vectors.push_back(VectorOf(*sent[i]));
    }
    TensorFlowThreads threads(context);
    const Encoded encoded =
        Encode(tensors, sources, static_cast<uint32_t>(fingerprints_[round_]), CurrentLevel(),
               threads, reinterpret_cast<uint32_t*>(words->flat<int32_t>().data()), vectors,
               round_);
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
};

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
      if (totals[i].NumElements() != NumSummed(tensors, i)) {
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
    return absl::OkStatus();
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
      TF_RETURN_IF_ERROR(context->allocate_output(i + 2, {sizes_[i]}, &sum));
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
    LockedRule rule;
    TF_RETURN_IF_ERROR(rule.Lock(context, attributes_));
    if (rule.sizes() != sizes_) {
      return absl::InvalidArgumentError("A variable is not of the size of its tensor.");
    }
    const std::vector<char> finite = opened.AreFinite(threads);
    if (std::all_of(finite.begin(), finite.end(), [](char is) { return is; })) {
      TF_RETURN_IF_ERROR(
          rule.Update(context, attributes_, CurrentLevel(), CopyOnHost,
                      [&](const UpdateRule& update) {
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

REGISTER_KERNEL_BUILDER(Name("TfDgcEncode").Device(tensorflow::DEVICE_CPU), EncodeKernel);
REGISTER_KERNEL_BUILDER(Name("TfDgcDecode").Device(tensorflow::DEVICE_CPU), DecodeKernel);
REGISTER_KERNEL_BUILDER(Name("TfDgcDecodeApply").Device(tensorflow::DEVICE_CPU),
                        DecodeApplyKernel);

}  // namespace
}  // namespace tf_dgc
