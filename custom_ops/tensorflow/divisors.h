// What gradients are divided by, of an operation's attributes and inputs.
#ifndef TF_DGC_TENSORFLOW_DIVISORS_H_
#define TF_DGC_TENSORFLOW_DIVISORS_H_

#include <vector>

#include "dividing.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "variables.h"

namespace tf_dgc {

// The divisors of an operation; their moments are locked as long as it exists.
class LockedDivisors {
 public:
  // `divided` is the attribute of that name.
  absl::Status Lock(tensorflow::OpKernelContext* context, const std::vector<int64_t>& divided) {
    tensorflow::OpInputList moments;
    TF_RETURN_IF_ERROR(context->input_list("moments", &moments));
    TF_RETURN_IF_ERROR(context->input("divisors", &numbers_));
    const int64_t num = divided.size();
    if (moments.size() != num || numbers_->NumElements() != num * kNumbers) {
      return absl::InvalidArgumentError(
          "There must be a moment and five numbers of each tensor that is divided.");
    }
    return moments_.Lock(context, moments);
  }

  // Returns the divisor of the j-th tensor that is divided, of a size and accumulators' type;
  // on CPUs.
  template <class Copy>
  absl::Status Find(tensorflow::OpKernelContext* context, int j, tensorflow::DataType type,
                    int64_t size, Copy copy, Divisor* found) {
    const double* given = numbers(j);
    *found = {nullptr, given[0], given[1], given[2], given[3], given[4]};
    if (found->factor == 0) return absl::OkStatus();
    return FindMoment(context, j, type, size, copy, &found->moment);
  }

  // Returns the moment alone.
  template <class Copy>
  absl::Status FindMoment(tensorflow::OpKernelContext* context, int j, tensorflow::DataType type,
                          int64_t size, Copy copy, void** moment) {
    return moments_.Writable(context, j, type, size, "second moment", copy, moment);
  }

  // The five numbers of the j-th tensor that is divided, where the operation has them.
  const double* numbers(int j) const { return numbers_->flat<double>().data() + j * kNumbers; }

 private:
  static constexpr int64_t kNumbers = 5;

  const tensorflow::Tensor* numbers_ = nullptr;
  LockedVariables moments_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_TENSORFLOW_DIVISORS_H_
