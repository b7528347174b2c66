// The update rules of Keras's optimizers, on a part of a variable and its slots, in place.
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
  // SGD: momentum. Adam: rate with bias correction, 1 - beta_1, 1 - beta_2, epsilon.
  // RMSprop: rho, 1 - rho, epsilon, momentum.
  float own[4];
};

constexpr int kMaxSlots = 3;

// A variable of one step, and what the optimizer remembers of it, all float32 [size].
struct Updated {
  int64_t size;
  bool decays;  // whether weight decay is for this one
  float* variable;
  float* slots[kMaxSlots];  // the first NumSlots() of the rule, in the order of its struct
};

// One of Keras's rules. It makes the same bits as Keras's own operations, one by one, in
// float32; denormals are zero within a job (see ForEachJob). Only TensorFlow's graph
// optimizer, which multiplies by `rsqrt` where RMSprop divides by `sqrt`, rounds otherwise.
class UpdateRule {
 public:
  // Slots of each variable by a rule's name; -1 if there is no rule of that name. Names are
  // "sgd", "adam", "rmsprop", followed by "_momentum" (SGD, RMSprop), "_nesterov" (SGD),
  // "_amsgrad" (Adam) or "_centered" (RMSprop, before "_momentum").
  static int NumSlots(const std::string& name);

  // `name` is one that NumSlots knows.
  UpdateRule(const std::string& name, const Hyperparameters& hyperparameters,
             std::vector<Updated> updated, Level level);

  const std::vector<Updated>& updated() const { return updated_; }

  // Updates the entries [begin, end) of a variable by `sums`, of which the first is that of
  // entry `begin`. Parts of a variable may be updated by several threads at once.
  void Apply(size_t variable, int64_t begin, int64_t end, const float* sums) const;

 private:
  using Function = void (*)(const Hyperparameters&, const Updated&, int64_t begin, int64_t end,
                            const float* sums);

  Hyperparameters hyperparameters_;
  std::vector<Updated> updated_;
  Function plain_;
  Function decaying_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_RULES_H_
