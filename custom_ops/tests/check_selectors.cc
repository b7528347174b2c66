#include "check_selectors.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "denormals.h"
#include "engine.h"
#include "pool.h"
#include "wire.h"

namespace tf_dgc {
namespace {

constexpr float kMomentum = 0.75f;
constexpr float kScale = 0.3f;

struct Problem {
  std::string name;
  std::vector<float> parameters;
  std::vector<float> gradient, velocity, residual, state;
  int64_t places;
  float least;  // magnitude from which entries are sent
  Rule rule;
  bool keeps, factor_masking;
  float scale = kScale;

  Coded Described() const {
    return {FindMethod(name), {int64_t(gradient.size()), 1, parameters, Draw(3, 5, 2, 0)}};
  }

  Source From(Problem& changed) const {
    return {int64_t(gradient.size()),
            GradientType::kFloat32,
            gradient.data(),
            scale,
            rule,
            kMomentum,
            rule == Rule::kNone ? nullptr : changed.velocity.data(),
            keeps ? changed.residual.data() : nullptr,
            {changed.state.data()},
            factor_masking};
  }

  // What an entry's value is before anything is sent; the velocity too.
  void Accumulate() {
    const FlushDenormals flush;
    for (size_t i = 0; i < gradient.size(); ++i) {
      const float g = scale * gradient[i];
      if (rule == Rule::kMomentum) velocity[i] = kMomentum * velocity[i] + g;
      residual[i] = (keeps ? residual[i] : 0) + (rule == Rule::kMomentum ? velocity[i] : g);
    }
  }

  // Positions of the largest, by sorting everything.
  std::vector<bool> Largest() const {
    const int64_t size = gradient.size();
    const auto offset = static_cast<int64_t>(Draw(3, 5, 2, 0).Tie() * size);
    std::vector<int64_t> order(size);
    std::iota(order.begin(), order.end(), 0);
    const auto rank = [&](int64_t i) {
      return std::make_pair(-std::abs(residual[i]), (i - offset + size) % size);
    };
    std::sort(order.begin(), order.end(), [&](auto a, auto b) { return rank(a) < rank(b); });
    std::vector<bool> largest(size);
    for (int64_t i = 0; i < places; ++i) {
      largest[order[i]] = !(std::abs(residual[order[i]]) < least);
    }
    return largest;
  }
};

Problem DrawProblem(Random& random, const std::string& name) {
  const int64_t sizes[] = {1, 15, 16, 1000, 4097, 70000, 200000};
  const int64_t size = sizes[Below(random, 7)];
  const int kind = Below(random, 4);
  Problem problem{name, {}, {}, {}, {}, std::vector<float>(size), 0, 0, Rule::kNone, true, false};
  for (int64_t i = 0; i < size; ++i) {
    problem.gradient.push_back(DrawNumber(random, kind));
    problem.velocity.push_back(kind == 0 ? DrawNumber(random, 0) : 0);
    problem.residual.push_back(kind == 0 ? DrawNumber(random, 0) : 0);
  }
  problem.places = std::max<int64_t>(1, std::pow(10.0, -0.5 * Below(random, 6)) * size);
  problem.parameters = {float(problem.places >> 16), float(problem.places & 0xffff)};
  problem.keeps = name == "variance_based" || Below(random, 3) > 0;
  problem.rule = problem.keeps && Below(random, 2) ? Rule::kMomentum : Rule::kNone;
  problem.factor_masking = Below(random, 2) == 0;
  auto& parameters = problem.parameters;
  if (name == "top_k") parameters.push_back(2.0f * Below(random, 3));
  if (name.substr(0, 9) == "threshold") {
    problem.least = 0.4f;
    parameters.insert(parameters.end(), {name == "threshold" ? 0.0f : 4.0f, problem.least});
  }
  if (name == "sampled_threshold") {
    parameters.insert(parameters.end(), {0, 0, std::max(1.0f, size * 0.5f), 0, 1});
  }
  if (name == "adacomp") parameters.insert(parameters.end(), {0, 50, 1.0f});
  if (name == "variance_based") parameters.insert(parameters.end(), {0.5f, 0.9f});
  return problem;
}

std::vector<uint32_t> EncodeEverywhere(const Problem& problem, Problem* after) {
  std::vector<uint32_t> first;
  for (const Level level : {Level::kBaseline, Level::kAvx2, Level::kAvx512}) {
    if (level > CurrentLevel()) continue;
    for (const int num_threads : {1, 3}) {
      Pool pool(num_threads);
      *after = problem;
      std::vector<uint32_t> words(NumWords({problem.Described()}));
      const Encoded encoded = Encode({problem.Described()}, {problem.From(*after)}, 7, level,
                                     pool, words.data(), {});
      REQUIRE(encoded.all_taken && encoded.entries <= problem.places);
      if (first.empty()) first = words;
      REQUIRE(words == first);
    }
  }
  return first;
}

Gathered AsGathered(const std::vector<uint32_t>& words) {
  return {words.data(), 1, static_cast<int64_t>(words.size()), 7};
}

// Whatever the words are, nothing outside of them is read.
void CheckSpoilt(Random& random, const Problem& problem, std::vector<uint32_t> words) {
  Pool pool(2);
  words[kHeaderWords + Below(random, words.size() - kHeaderWords)] ^= 1u << Below(random, 32);
  WriteHeader(7, true, words.data(), words.size());
  Buffers buffers;
  const std::string wrong = buffers.Open({problem.Described()}, {AsGathered(words)}, {},
                                         CurrentLevel(), pool);
  std::vector<float> sums(problem.gradient.size());
  if (wrong.empty()) buffers.Sum({sums.data()}, pool);
}

void Check(Random& random, const std::string& name) {
  const Problem problem = DrawProblem(random, name);
  Problem after = problem, expected = problem;
  const std::vector<uint32_t> words = EncodeEverywhere(problem, &after);
  expected.Accumulate();
  Pool pool(3);
  Buffers buffers;
  REQUIRE(buffers.Open({problem.Described()}, {AsGathered(words)}, {}, CurrentLevel(), pool)
              .empty());
  std::vector<float> sent(problem.gradient.size());
  REQUIRE(buffers.Sum({sent.data()}, pool)[0]);
  REQUIRE(buffers.AreFinite(pool)[0]);
  const std::vector<bool> largest = expected.Largest();
  const bool by_size = name == "top_k" || name.substr(0, 9) == "threshold";
  const bool partial = std::count(largest.begin(), largest.end(), true) < int64_t(sent.size());
  for (size_t i = 0; i < sent.size(); ++i) {
    if (by_size) REQUIRE(largest[i] || sent[i] == 0);
    if (name == "threshold") REQUIRE(sent[i] == (largest[i] ? expected.residual[i] : 0));
    if (problem.keeps) REQUIRE(after.residual[i] == expected.residual[i] - sent[i]);
    if (by_size && problem.rule == Rule::kMomentum) {
      const bool masked = problem.factor_masking && partial && largest[i];
      REQUIRE(after.velocity[i] == (masked ? 0 : expected.velocity[i]));
    }
  }
  CheckSpoilt(random, problem, words);
}

// Denormals that nothing is added to are entries as others are.
void CheckDenormals(Random& random) {
  Problem problem = DrawProblem(random, "top_k");
  problem.keeps = false;
  problem.rule = Rule::kNone;
  problem.scale = 1;
  std::fill(problem.gradient.begin(), problem.gradient.end(), 0.0f);
  for (int i = 0; i < 3; ++i) {
    problem.gradient[Below(random, problem.gradient.size())] = i == 0 ? 1.0f : 1e-40f;
  }
  Problem after = problem;
  const std::vector<uint32_t> words = EncodeEverywhere(problem, &after);
  Pool pool(2);
  Buffers buffers;
  REQUIRE(buffers.Open({problem.Described()}, {AsGathered(words)}, {}, CurrentLevel(), pool)
              .empty());
}

}  // namespace

void CheckSelectors(Random& random) {
  for (const char* name : {"top_k", "threshold", "threshold, binary", "sampled_threshold", "sbc",
                           "adacomp", "variance_based"}) {
    Check(random, name);
  }
  CheckDenormals(random);
}

}  // namespace tf_dgc
