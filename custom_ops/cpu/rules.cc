#include "rules.h"

#include <cmath>
#include <utility>

namespace tf_dgc {
namespace {

// An entry of a variable and of its slots, while it is updated.
struct Entry {
  float w;
  float a;
  float b;
  float c;
};

#define TF_DGC_INLINE static inline __attribute__((always_inline)) void

// The order of operations is that of `update_step` in Keras's file of the same name.
template <bool kMomentum, bool kNesterov>
struct Sgd {  // slots: momentum
  static constexpr int kSlots = kMomentum ? 1 : 0;
  TF_DGC_INLINE Step(const Hyperparameters& h, float g, Entry& e) {
    const float factor = h.own[0], momentum = h.own[1];
    if (!kMomentum) {
      e.w -= g * factor;
      return;
    }
    e.a = e.a * momentum - g * factor;
    e.w += kNesterov ? e.a * momentum - g * factor : e.a;
  }
};

template <bool kAmsgrad>
struct Adam {  // slots: momentum, velocity, largest velocity
  static constexpr int kSlots = kAmsgrad ? 3 : 2;
  TF_DGC_INLINE Step(const Hyperparameters& h, float g, Entry& e) {
    const auto [alpha, rest_1, rest_2, epsilon] = h.own;
    e.a += (g - e.a) * rest_1;
    e.b += (g * g - e.b) * rest_2;
    if (kAmsgrad) e.c = e.c > e.b ? e.c : e.b;
    e.w -= e.a * alpha / (std::sqrt(kAmsgrad ? e.c : e.b) + epsilon);
  }
};

template <bool kCentered, bool kMomentum>
struct RmsProp {  // slots: velocity, average gradient if centered, momentum
  static constexpr int kSlots = 1 + (kCentered ? 1 : 0) + (kMomentum ? 1 : 0);
  TF_DGC_INLINE Step(const Hyperparameters& h, float g, Entry& e) {
    const auto [rho, rest, epsilon, momentum] = h.own;
    e.a = rho * e.a + rest * (g * g);
    float denominator = e.a + epsilon;
    if (kCentered) {
      e.b = rho * e.b + rest * g;
      denominator = e.a - e.b * e.b + epsilon;
    }
    const float increment = h.rate * g / std::sqrt(denominator);
    float& accumulated = kCentered ? e.c : e.b;
    if (kMomentum) accumulated = momentum * accumulated + increment;
    e.w -= kMomentum ? accumulated : increment;
  }
};

struct Kept {
  static constexpr int kSlots = 0;
  // Sums begin with 0, also those that come as they are: then -0 and denormals become 0.
  TF_DGC_INLINE Step(const Hyperparameters&, float g, Entry& e) { e.w = 0.0f + g; }
};

struct Functions {
  using Function = void (*)(const Hyperparameters&, const Updated&, int64_t, int64_t,
                            const float*);
  Function plain;
  Function decaying;
};

#define TF_DGC_LOOPS "rules_impl.inc"
#include "every_level.inc"

template <class Kind>
Functions OfLevel(Level level) {
  return TF_DGC_OF_LEVEL(level, Get<Kind>());
}

struct Kind {
  const char* name;
  int num_slots;
  Functions (*of_level)(Level);
};

template <class T>
constexpr Kind Named(const char* name) {
  return {name, T::kSlots, OfLevel<T>};
}

constexpr Kind kKinds[] = {
    Named<Sgd<false, false>>("sgd"),
    Named<Sgd<true, false>>("sgd_momentum"),
    Named<Sgd<true, true>>("sgd_nesterov"),
    Named<Adam<false>>("adam"),
    Named<Adam<true>>("adam_amsgrad"),
    Named<RmsProp<false, false>>("rmsprop"),
    Named<RmsProp<false, true>>("rmsprop_momentum"),
    Named<RmsProp<true, false>>("rmsprop_centered"),
    Named<RmsProp<true, true>>("rmsprop_centered_momentum"),
    Named<Kept>("kept"),
};

const Kind* Find(const std::string& name) {
  for (const Kind& kind : kKinds) {
    if (name == kind.name) return &kind;
  }
  return nullptr;
}

}  // namespace

int UpdateRules::NumSlots(const std::string& name) {
  const Kind* kind = Find(name);
  return kind == nullptr ? -1 : kind->num_slots;
}

UpdateRules::UpdateRules(const std::vector<UpdateRule>& rules, std::vector<Updated> updated,
                         Level level)
    : updated_(std::move(updated)) {
  for (const auto& [name, numbers] : rules) {
    const Functions functions = Find(name)->of_level(level);
    known_.push_back({numbers, functions.plain, functions.decaying, name == "sgd"});
  }
}

bool UpdateRules::Descends(size_t variable, float* rate) const {
  const Known& rule = RuleOf(variable);
  *rate = rule.hyperparameters.own[0];
  return rule.descends && !updated_[variable].decays;
}

void UpdateRules::Apply(size_t variable, int64_t begin, int64_t end, const float* sums) const {
  const Updated& updated = updated_[variable];
  const Known& rule = RuleOf(variable);
  (updated.decays ? rule.decaying : rule.plain)(rule.hyperparameters, updated, begin, end, sums);
}

}  // namespace tf_dgc
