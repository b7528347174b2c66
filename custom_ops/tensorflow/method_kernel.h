// What the operations of native methods have in common.
#ifndef TF_DGC_TENSORFLOW_METHOD_KERNEL_H_
#define TF_DGC_TENSORFLOW_METHOD_KERNEL_H_

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "cpu_kernel.h"
#include "engine.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "threads.h"
#include "types.h"
#include "variables.h"

namespace tf_dgc {

using tensorflow::DataTypeSize;
using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
// Not those of tf_dgc.
using Values = tensorflow::Tensor;

// What they know of the tensors. `Base` is OpKernel or AsyncOpKernel.
template <class Base>
class MethodAttributes : public Base {
 public:
  explicit MethodAttributes(OpKernelConstruction* context) : Base(context) {
    std::vector<std::string> firsts;
    std::vector<int64_t> num_parameters;
    std::vector<float> parameters;
    OP_REQUIRES_OK(context, context->GetAttr("methods", &names_));
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
    OP_REQUIRES_OK(context, context->GetAttr("first_vectors", &first_vectors_));
    OP_REQUIRES_OK(context, context->GetAttr("num_numbers", &num_numbers_));
    const size_t num = names_.size();
    OP_REQUIRES(context,
                num_parameters.size() == num && sizes_.size() == num && columns_.size() == num &&
                    vectors_.size() == num && indices_.size() == num && firsts.size() == num &&
                    first_vectors_.size() == num &&
                    num_numbers_.size() == num && !fingerprints_.empty() &&
                    fingerprints_.size() <= 2,
                absl::InvalidArgumentError("There must be one of each attribute per tensor."));
    auto next = parameters.begin();
    for (size_t i = 0; i < num; ++i) {
      methods_.push_back(FindMethod(names_[i]));
      OP_REQUIRES(context, methods_[i] != nullptr && parameters.end() - next >= num_parameters[i],
                  absl::InvalidArgumentError("There is no native method of this name, or too "
                                             "few parameters of it: " +
                                             names_[i]));
      firsts_.push_back(FindMethod(firsts[i]));
      OP_REQUIRES(context, firsts[i].empty() == (firsts_[i] == nullptr),
                  absl::InvalidArgumentError("There is no such method: " + firsts[i]));
      OP_REQUIRES(context, vectors_[i] >= -1 && vectors_[i] < int64_t(vector_types_.size()),
                  absl::InvalidArgumentError("There is no such vector."));
      OP_REQUIRES(context,
                  first_vectors_[i] >= -1 && first_vectors_[i] < int64_t(vector_types_.size()),
                  absl::InvalidArgumentError("There is no such vector."));
      parameters_.emplace_back(next, next + num_parameters[i]);
      next += num_parameters[i];
    }
    GiveToTensorFlow();
  }
  ~MethodAttributes() override { TakeFromTensorFlow(); }

 protected:
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
           firsts_[i],
           static_cast<int>(first_vectors_[i])});
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

  static absl::Status GiveBack(OpKernelContext* context, int output,
                               const std::vector<float>& numbers) {
    Values* given;
    TF_RETURN_IF_ERROR(
        context->allocate_output(output, {static_cast<int64_t>(numbers.size())}, &given));
    std::copy(numbers.begin(), numbers.end(), given->flat<float>().data());
    return absl::OkStatus();
  }

  static Vector VectorOf(const Values& values) {
    return {static_cast<char*>(values.data()), DataTypeSize(values.dtype())};
  }

  std::vector<std::string> names_;
  std::vector<const Method*> methods_;
  std::vector<std::vector<float>> parameters_;
  std::vector<const Method*> firsts_;  // null where there is one round
  std::vector<int64_t> sizes_, columns_, indices_, vectors_, first_vectors_, num_numbers_;
  std::vector<int64_t> fingerprints_;  // of each round
  tensorflow::DataTypeVector vector_types_;
  int64_t seed_;
};

// On CPUs.
using MethodKernel = CpuKernel<MethodAttributes<OpKernel>>;

}  // namespace tf_dgc

#endif  // TF_DGC_TENSORFLOW_METHOD_KERNEL_H_
