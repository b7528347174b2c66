// Update rules: those of Keras's optimizers, and of what was divided before it was sent, on a
// part of a variable and its slots, in place.
#ifndef TF_DGC_CPU_RULES_H_
#define TF_DGC_CPU_RULES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "loops.h"

namespace tf_dgc {

// The numbers of a rule, each rounded to float32 as Keras rounds it.
struct Hyperparameters {
  float rate;   // of learning, also that of the weight decay
  float decay;  // of weights: w -= w * decay * rate, before anything else
  // SGD: what the sum is multiplied by, which is the rate unless the sum has it; momentum.
  // Adam: rate with bias correction, 1 - beta_1, 1 - beta_2, epsilon. RMSprop: rho, 1 - rho,
  // epsilon, momentum.
  float own[4];
};

constexpr int kMaxSlots = 3;

// A rule of a step.
struct UpdateRule {
  std::string name;  // one that NumSlots knows
  Hyperparameters hyperparameters;
};

// A variable of one step, and what the optimizer remembers of it, all float32 [size].
struct Updated {
  int64_t size;
  bool decays;  // whether weight decay is for this one
  float* variable;
  float* slots[kMaxSlots];  // the first NumSlots() of the rule, in the order of its struct
  size_t rule = 0;          // its place among those of the step
};

// The rules of a step. Keras's make the same bits as Keras's own operations, one by one, in
// float32; denormals are zero within a job (see ForEachJob). Only TensorFlow's graph
// optimizer, which multiplies by `rsqrt` where RMSprop divides by `sqrt`, rounds otherwise.
class UpdateRules {
 public:
  // Slots of each variable by a rule's name; -1 if there is no rule of that name. Names are
  // "sgd", "adam", "rmsprop", followed by "_momentum" (SGD, RMSprop), "_nesterov" (SGD),
  // "_amsgrad" (Adam) or "_centered" (RMSprop, before "_momentum"). Besides, "kept" makes the
  // variable the sum.
  static int NumSlots(const std::string& name);

  UpdateRules(const std::vector<UpdateRule>& rules, std::vector<Updated> updated, Level level);

  const std::vector<Updated>& updated() const { return updated_; }

  // Whether all that happens to a variable is that `rate` times the sum is subtracted, so that
  // nothing does where that is 0.
  bool Descends(size_t variable, float* rate) const;

  // Updates the entries [begin, end) of a variable by `sums`, of which the first is that of
  // entry `begin`. Parts of a variable may be updated by several threads at once.
  void Apply(size_t variable, int64_t begin, int64_t end, const float* sums) const;

 private:
  using Function = void (*)(const Hyperparameters&, const Updated&, int64_t begin, int64_t end,
                            const float* sums);
  struct Known {
    Hyperparameters hyperparameters;
    Function plain;
    Function decaying;
    bool descends;
  };

  const Known& RuleOf(size_t variable) const { return known_[updated_[variable].rule]; }

  std::vector<Updated> updated_;
  std::vector<Known> known_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_RULES_H_
