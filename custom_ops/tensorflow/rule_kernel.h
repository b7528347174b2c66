// What makes an update rule of an operation's attributes and inputs.
#ifndef TF_DGC_TENSORFLOW_RULE_KERNEL_H_
#define TF_DGC_TENSORFLOW_RULE_KERNEL_H_

#include <string>
#include <utility>
#include <vector>

#include "rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "variables.h"

namespace tf_dgc {

// The attributes `rule` and `decays`.
struct RuleAttributes {
  std::string name;
  std::vector<bool> decays;
  int num_slots;

  int num_variables() const { return static_cast<int>(decays.size()); }

  absl::Status Read(tensorflow::OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("rule", &name));
    TF_RETURN_IF_ERROR(context->GetAttr("decays", &decays));
    int num_updated;
    TF_RETURN_IF_ERROR(context->GetAttr("num_updated", &num_updated));
    num_slots = UpdateRule::NumSlots(name);
    if (num_slots < 0) {
      return absl::InvalidArgumentError(absl::StrCat("There is no update rule '", name, "'."));
    }
    if (num_updated != num_variables() * (1 + num_slots)) {
      return absl::InvalidArgumentError(
          absl::StrCat("The rule '", name, "' has ", num_slots,
                       " slots per variable. There must be one value of `decays` per variable, "
                       "and all variables, then all first slots, and so on, in `updated`."));
    }
    return absl::OkStatus();
  }
};

// The variables of a rule and their slots, locked until it ends. First the sizes are known,
// which say what a buffer must be; nothing is copied or written before `Make`.
class LockedRule {
 public:
  absl::Status Lock(tensorflow::OpKernelContext* context, const RuleAttributes& attributes) {
    tensorflow::OpInputList handles;
    const tensorflow::Tensor* numbers;
    TF_RETURN_IF_ERROR(context->input_list("updated", &handles));
    TF_RETURN_IF_ERROR(context->input("hyperparameters", &numbers));
    constexpr int kNumbers = sizeof(Hyperparameters) / sizeof(float);
    if (numbers->NumElements() != kNumbers) {
      return absl::InvalidArgumentError(
          absl::StrCat("There must be ", kNumbers, " hyperparameters."));
    }
    const auto given = numbers->flat<double>();
    const auto number = [&](int i) { return static_cast<float>(given(i)); };
    hyperparameters_ = {number(0), number(1), {number(2), number(3), number(4), number(5)}};
    TF_RETURN_IF_ERROR(variables_.Lock(context, handles));
    for (int i = 0; i < attributes.num_variables(); ++i) sizes_.push_back(variables_.Size(i));
    return absl::OkStatus();
  }

  const std::vector<int64_t>& sizes() const { return sizes_; }

  // Calls work(rule); `copy` as in LockedVariables.
  template <class Copy, class Work>
  absl::Status Update(tensorflow::OpKernelContext* context, const RuleAttributes& attributes,
                      Level level, Copy copy, Work work) {
    const int num = attributes.num_variables();
    std::vector<Updated> updated;
    for (int i = 0; i < num; ++i) {
      updated.push_back({sizes_[i], attributes.decays[i], nullptr, {}});
      for (int slot = -1; slot < attributes.num_slots; ++slot) {
        void* data = nullptr;
        TF_RETURN_IF_ERROR(variables_.Writable(context, i + (slot + 1) * num,
                                               tensorflow::DT_FLOAT, sizes_[i],
                                               slot < 0 ? "variable" : "slot", copy, &data));
        float*& target = slot < 0 ? updated[i].variable : updated[i].slots[slot];
        target = static_cast<float*>(data);
      }
    }
    work(UpdateRule(attributes.name, hyperparameters_, std::move(updated), level));
    return absl::OkStatus();
  }

 private:
  Hyperparameters hyperparameters_;
  std::vector<int64_t> sizes_;
  LockedVariables variables_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_TENSORFLOW_RULE_KERNEL_H_
