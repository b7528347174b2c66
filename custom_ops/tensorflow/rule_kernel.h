// What makes update rules of an operation's attributes and inputs.
#ifndef TF_DGC_TENSORFLOW_RULE_KERNEL_H_
#define TF_DGC_TENSORFLOW_RULE_KERNEL_H_

#include <string>
#include <utility>
#include <vector>

#include "rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "variables.h"

namespace tf_dgc {

// The attributes `rules`, `rule_of` and `decays`.
struct RuleAttributes {
  std::vector<std::string> names;  // of the rules
  std::vector<int64_t> rule_of;    // of each variable
  std::vector<bool> decays;
  std::vector<int> num_slots;  // of each variable

  int num_variables() const { return static_cast<int>(decays.size()); }

  absl::Status Read(tensorflow::OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("rules", &names));
    TF_RETURN_IF_ERROR(context->GetAttr("rule_of", &rule_of));
    TF_RETURN_IF_ERROR(context->GetAttr("decays", &decays));
    for (const std::string& name : names) {
      if (UpdateRules::NumSlots(name) >= 0) continue;
      return absl::InvalidArgumentError(absl::StrCat("There is no update rule '", name, "'."));
    }
    int num_updated, expected = num_variables();
    TF_RETURN_IF_ERROR(context->GetAttr("num_updated", &num_updated));
    for (const int64_t rule : rule_of) {
      if (rule < 0 || rule >= static_cast<int64_t>(names.size())) {
        return absl::InvalidArgumentError("There is no such rule among those of the step.");
      }
      num_slots.push_back(UpdateRules::NumSlots(names[rule]));
      expected += num_slots.back();
    }
    if (rule_of.size() != decays.size() || num_updated != expected) {
      return absl::InvalidArgumentError(absl::StrCat(
          "There must be one value of `rule_of` and of `decays` per variable, and each variable "
          "before its slots in `updated`, in all ", expected, " of them."));
    }
    return absl::OkStatus();
  }
};

// The variables of rules and their slots, locked until it ends. First the sizes are known,
// which say what a buffer must be; nothing is copied or written before `Update`.
class LockedRules {
 public:
  absl::Status Lock(tensorflow::OpKernelContext* context, const RuleAttributes& attributes) {
    tensorflow::OpInputList handles;
    TF_RETURN_IF_ERROR(context->input_list("updated", &handles));
    TF_RETURN_IF_ERROR(ReadNumbers(context, attributes));
    TF_RETURN_IF_ERROR(variables_.Lock(context, handles));
    int at = 0;
    for (const int num_slots : attributes.num_slots) {
      sizes_.push_back(variables_.Size(at));
      at += 1 + num_slots;
    }
    return absl::OkStatus();
  }

  const std::vector<int64_t>& sizes() const { return sizes_; }

  // Calls work(rules); `copy` as in LockedVariables.
  template <class Copy, class Work>
  absl::Status Update(tensorflow::OpKernelContext* context, const RuleAttributes& attributes,
                      Level level, Copy copy, Work work) {
    std::vector<Updated> updated;
    for (int i = 0, at = 0; i < attributes.num_variables(); ++i) {
      updated.push_back({sizes_[i], attributes.decays[i], nullptr, {},
                         static_cast<size_t>(attributes.rule_of[i])});
      for (int slot = -1; slot < attributes.num_slots[i]; ++slot, ++at) {
        void* data = nullptr;
        TF_RETURN_IF_ERROR(variables_.Writable(context, at, tensorflow::DT_FLOAT, sizes_[i],
                                               slot < 0 ? "variable" : "slot", copy, &data));
        float*& target = slot < 0 ? updated[i].variable : updated[i].slots[slot];
        target = static_cast<float*>(data);
      }
    }
    work(UpdateRules(rules_, std::move(updated), level));
    return absl::OkStatus();
  }

 private:
  absl::Status ReadNumbers(tensorflow::OpKernelContext* context,
                           const RuleAttributes& attributes) {
    const tensorflow::Tensor* numbers;
    TF_RETURN_IF_ERROR(context->input("hyperparameters", &numbers));
    constexpr int kNumbers = sizeof(Hyperparameters) / sizeof(float);
    const int64_t num_rules = attributes.names.size();
    if (numbers->NumElements() != num_rules * kNumbers) {
      return absl::InvalidArgumentError(
          absl::StrCat("There must be ", kNumbers, " hyperparameters of each rule."));
    }
    const auto given = numbers->flat<double>();
    for (int64_t rule = 0; rule < num_rules; ++rule) {
      const auto number = [&](int i) { return static_cast<float>(given(rule * kNumbers + i)); };
      rules_.push_back({attributes.names[rule],
                        {number(0), number(1), {number(2), number(3), number(4), number(5)}}});
    }
    return absl::OkStatus();
  }

  std::vector<UpdateRule> rules_;
  std::vector<int64_t> sizes_;
  LockedVariables variables_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_TENSORFLOW_RULE_KERNEL_H_
