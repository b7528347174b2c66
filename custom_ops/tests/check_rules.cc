#include "check_rules.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "denormals.h"
#include "pool.h"
#include "update.h"

namespace tf_dgc {
namespace {

// One variable and its slots, by themselves: what a rule updates, and its reference.
using Memory = std::vector<std::vector<float>>;

// The formulas of Keras's documentation and files; `x` is an entry of variable and slots.
void Reference(const std::string& name, const Hyperparameters& h, float g, float* x) {
  const bool momentum = name.find("momentum") != std::string::npos;
  if (name == "sgd") {
    x[0] = x[0] - g * h.own[0];
  } else if (name == "sgd_momentum") {
    x[1] = x[1] * h.own[1] - g * h.own[0];
    x[0] = x[0] + x[1];
  } else if (name == "sgd_nesterov") {
    x[1] = x[1] * h.own[1] - g * h.own[0];
    x[0] = x[0] + (x[1] * h.own[1] - g * h.own[0]);
  } else if (name.substr(0, 4) == "adam") {
    x[1] = x[1] + (g - x[1]) * h.own[1];
    x[2] = x[2] + (g * g - x[2]) * h.own[2];
    float velocity = x[2];
    if (name == "adam_amsgrad") velocity = x[3] = std::max(x[3], x[2]);
    x[0] = x[0] - x[1] * h.own[0] / (std::sqrt(velocity) + h.own[3]);
  } else if (name == "kept") {
    x[0] = 0.0f + g;
  } else {
    const bool centered = name.find("centered") != std::string::npos;
    x[1] = h.own[0] * x[1] + h.own[1] * (g * g);
    if (centered) x[2] = h.own[0] * x[2] + h.own[1] * g;
    const float variance = centered ? x[1] - x[2] * x[2] : x[1];
    const float increment = h.rate * g / std::sqrt(variance + h.own[2]);
    float* accumulated = x + (centered ? 3 : 2);
    if (momentum) *accumulated = h.own[3] * *accumulated + increment;
    x[0] = x[0] - (momentum ? *accumulated : increment);
  }
}

bool Same(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) {
      return false;
    }
  }
  return a.size() == b.size();
}

struct Problem {
  std::vector<std::string> names;  // of the rules
  Hyperparameters hyperparameters;
  std::vector<size_t> rules;  // of each variable
  std::vector<bool> decays;
  std::vector<Memory> variables;
  std::vector<std::vector<float>> sums;

  UpdateRules Rules(std::vector<Memory>& memory, Level level) const {
    std::vector<Updated> updated;
    for (size_t v = 0; v < memory.size(); ++v) {
      const int64_t size = memory[v][0].size();
      updated.push_back({size, decays[v], memory[v][0].data(), {}, rules[v]});
      for (size_t s = 1; s < memory[v].size(); ++s) {
        updated[v].slots[s - 1] = memory[v][s].data();
      }
    }
    std::vector<UpdateRule> known;
    for (const std::string& name : names) known.push_back({name, hyperparameters});
    return UpdateRules(known, updated, level);
  }

  std::vector<Memory> Expected() const {
    const FlushDenormals flush;
    std::vector<Memory> memory = variables;
    for (size_t v = 0; v < memory.size(); ++v) {
      for (size_t i = 0; i < sums[v].size(); ++i) {
        float x[1 + kMaxSlots];
        for (size_t s = 0; s < memory[v].size(); ++s) x[s] = memory[v][s][i];
        if (decays[v]) x[0] = x[0] - x[0] * hyperparameters.decay * hyperparameters.rate;
        Reference(names[rules[v]], hyperparameters, sums[v][i], x);
        for (size_t s = 0; s < memory[v].size(); ++s) memory[v][s][i] = x[s];
      }
    }
    return memory;
  }
};

Problem DrawProblem(Random& random, const std::string& name) {
  const Hyperparameters numbers{0.1f, 0.01f, {0.9f, 0.1f, 1e-3f, 0.5f}};
  Problem problem{{name, "sgd", "kept"}, numbers, {}, {}, {}, {}};
  if (name.substr(0, 4) == "adam") problem.hyperparameters.own[3] = 1e-7f;
  const int64_t sizes[] = {0, 1, 7, 64, 4095, 4096, 4097, 65537, 140000};
  const int64_t num = 1 + Below(random, 3);
  for (int64_t v = 0; v < num; ++v) {
    const int64_t size = sizes[Below(random, 9)];
    const int kind = Below(random, 4);
    problem.rules.push_back(v == 0 ? 0 : Below(random, 3));
    const int num_slots = UpdateRules::NumSlots(problem.names[problem.rules.back()]);
    Memory memory(1 + num_slots, std::vector<float>(size));
    std::vector<float> sums(size);
    for (auto& numbers : memory) {
      for (float& x : numbers) x = std::abs(DrawNumber(random, kind));
    }
    for (float& x : sums) x = DrawNumber(random, Below(random, 3));
    if (size > 0) sums[Below(random, size)] = 3e38f;
    if (size > 0) sums[Below(random, size)] = 1e-40f;
    problem.decays.push_back(Below(random, 2) == 0);
    problem.variables.push_back(memory);
    problem.sums.push_back(sums);
  }
  return problem;
}

// The words of a worker that sends all sums.
std::vector<uint32_t> Whole(const Problem& problem, std::vector<Layout>* layout) {
  std::vector<uint32_t> words(kHeaderWords);
  for (const auto& sums : problem.sums) {
    const int64_t size = sums.size();
    layout->push_back({size, size, false, ValueType::kExempt});
    for (const float x : sums) words.push_back(BitCast<uint32_t>(x));
  }
  WriteHeader(7, true, words.data(), words.size());
  return words;
}

void Check(Random& random, const std::string& name) {
  const Problem problem = DrawProblem(random, name);
  const std::vector<Memory> expected = problem.Expected();
  std::vector<const float*> sums;
  for (const auto& s : problem.sums) sums.push_back(s.data());
  std::vector<Layout> layout;
  const std::vector<uint32_t> words = Whole(problem, &layout);
  for (const Level level : {Level::kBaseline, Level::kAvx2, Level::kAvx512}) {
    if (level > CurrentLevel()) continue;
    for (const int num_threads : {1, 3}) {
      Pool pool(num_threads);
      std::vector<Memory> from_sums = problem.variables;
      ApplySums(problem.Rules(from_sums, level), sums, pool);
      std::vector<Memory> from_words = problem.variables;
      Decoded decoded;
      REQUIRE(decoded.Decode(layout, words.data(), 1, words.size(), 7, pool).empty());
      decoded.Apply(problem.Rules(from_words, level), pool);
      for (size_t v = 0; v < expected.size(); ++v) {
        for (size_t s = 0; s < expected[v].size(); ++s) {
          REQUIRE(Same(from_sums[v][s], expected[v][s]));
          REQUIRE(Same(from_words[v][s], expected[v][s]));
        }
      }
    }
  }
}

}  // namespace

void CheckRules(Random& random) {
  REQUIRE(UpdateRules::NumSlots("adam_nesterov") == -1);
  for (const char* name :
       {"sgd", "sgd_momentum", "sgd_nesterov", "adam", "adam_amsgrad", "rmsprop",
        "rmsprop_momentum", "rmsprop_centered", "rmsprop_centered_momentum"}) {
    Check(random, name);
  }
}

}  // namespace tf_dgc
