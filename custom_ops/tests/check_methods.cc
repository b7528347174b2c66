#include "check_methods.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "denormals.h"
#include "divided.h"
#include "engine.h"
#include "pool.h"
#include "wire.h"

namespace tf_dgc {
namespace {

using Words = std::vector<uint32_t>;

// A method, and what holds of it.
struct Row {
  const char* name;
  std::vector<float> parameters;
  bool keeps = true;  // whether it may be used with a residual
  int64_t itemsize = 0;  // of the numbers that are summed on the way; 0 if words are gathered
  std::vector<float> numbers = {};  // from a round before
  bool is_momentum = false;  // what is kept: there must be some, and not all words are good
};

// What a worker has before and after a step.
struct Worker {
  std::vector<float> gradient, residual;
  std::vector<std::vector<float>> states;
  std::vector<float> shared;  // what all workers remember alike
  std::vector<float> moment;  // if the gradient is divided
  Divisor divisor;

  Source From(bool keeps) {
    std::vector<float*> pointers;
    for (auto& state : states) pointers.push_back(state.data());
    if (!moment.empty()) divisor.moment = moment.data();
    return {int64_t(gradient.size()), GradientType::kFloat32, gradient.data(), 1.0f, Rule::kNone,
            0, nullptr, keeps ? residual.data() : nullptr, pointers, false, divisor};
  }
};

struct Sent {
  Words words;
  std::vector<char> numbers;  // that are summed on the way
  Worker after;
  std::vector<float> sums[2];  // of one and of two workers

  bool operator==(const Sent& other) const {
    return words == other.words && numbers == other.numbers &&
           after.residual == other.after.residual && after.states == other.after.states &&
           after.shared == other.after.shared && after.moment == other.after.moment && sums[0] == other.sums[0] &&
           sums[1] == other.sums[1];
  }
};

std::vector<Vector> VectorsOf(const Row& row, std::vector<char>& numbers) {
  if (row.itemsize == 0) return {};
  return {{numbers.data(), row.itemsize}};
}

// The sum over workers, and what all remember afterwards.
std::vector<float> SumOf(const Row& row, const std::vector<Coded>& coded,
                         const Words& words, int64_t num_workers, Level level, Pool& pool,
                         Sent* sent) {
  Buffers buffers;
  const int64_t num_words = words.size() / num_workers;
  REQUIRE(buffers.Open(coded, {{words.data(), num_workers, num_words, 7}},
                       VectorsOf(row, sent->numbers), level, pool)
              .empty());
  if (coded[0].method->num_shared > 0) buffers.Remember({{sent->after.shared.data()}});
  std::vector<float> sum(coded[0].setup.size);
  const auto finite = buffers.Sum({sum.data()}, pool);
  if (coded[0].method->num_shared == 0) REQUIRE(finite == buffers.AreFinite(pool));
  return sum;
}

Sent Send(const Row& row, const std::vector<Coded>& coded, const Worker& before,
          bool keeps, Level level, int num_threads) {
  Pool pool(num_threads);
  const int64_t numbers = row.itemsize > 0 ? NumSummed(coded, 0) : 0;
  Sent sent{Words(NumWords(coded)), std::vector<char>(row.itemsize * numbers), before, {}};
  REQUIRE(Encode(coded, {sent.after.From(keeps)}, 7, level, pool, sent.words.data(),
                 VectorsOf(row, sent.numbers))
              .all_taken);
  Words both = sent.words;
  both.insert(both.end(), sent.words.begin(), sent.words.end());
  sent.sums[0] = SumOf(row, coded, sent.words, 1, level, pool, &sent);
  sent.sums[1] = SumOf(row, coded, both, 2, level, pool, &sent);
  return sent;
}

// A number that is none is not overlooked, in whichever unit it is.
void CheckNumber(Random& random, const Row& row, const std::vector<Coded>& coded, Words words,
                 const Worker& before, Pool& pool) {
  const std::string name = row.name;
  const std::string all_of[] = {"uniform_8bit", "qsgd", "diana", "rotated_quantization",
                                "ef_sign_sgd", "one_bit"};
  const bool has_numbers = std::any_of(std::begin(all_of), std::end(all_of), [&](const auto& some) {
    return name.substr(0, some.size()) == some;
  });
  if (!has_numbers) return;
  const bool has_two = name == "one_bit" || name == "rotated_quantization";
  words[kHeaderWords + (has_two ? Below(random, 2) : 0)] =
      Below(random, 2) ? 0x7fc00000 : 0x7f800000;
  WriteHeader(7, true, words.data(), words.size());
  Buffers buffers;
  const auto num_words = static_cast<int64_t>(words.size());
  REQUIRE(buffers.Open(coded, {{words.data(), 1, num_words, 7}}, {}, CurrentLevel(), pool).empty());
  std::vector<float> sum(coded[0].setup.size), shared = before.shared;
  if (coded[0].method->num_shared > 0) buffers.Remember({{shared.data()}});
  const auto finite = buffers.AreFinite(pool);
  REQUIRE(buffers.Sum({sum.data()}, pool) == finite);
  if (name != "one_bit") REQUIRE(!finite[0]);  // of which one may not be used
  REQUIRE(finite[0] || std::memcmp(shared.data(), before.shared.data(), 4 * shared.size()) == 0);
}

void Check(Random& random, Row row) {
  const int64_t sizes[] = {1, 31, 64, 100, 1023, 1024, 5000, 5001, 9999, 70001};
  const int64_t size = sizes[Below(random, 10)];
  if (row.name == std::string("random_k")) row.parameters[1] = 1 + Below(random, size);
  const Method* method = FindMethod(row.name);
  REQUIRE(method != nullptr);
  Worker before;
  const int kind = Below(random, 4);
  for (int64_t i = 0; i < size; ++i) {
    before.gradient.push_back(DrawNumber(random, kind));
    before.residual.push_back(DrawNumber(random, 0));
  }
  before.states.assign(method->num_states, before.residual);
  before.shared = before.gradient;
  const bool keeps = row.is_momentum || (row.keeps && Below(random, 2) == 0);
  if (keeps && Below(random, 2) == 0) {
    before.divisor = DrawDivisor(random, nullptr);
    for (int64_t i = 0; i < size; ++i) before.moment.push_back(std::abs(DrawNumber(random, 0)));
  }
  const int64_t columns = size % 5 == 0 ? 5 : 1;
  const Draw draw(1, Below(random, 9), 0, 0);
  const std::vector<Coded> coded = {
      {method, {size, columns, row.parameters, draw, row.numbers}, row.itemsize > 0 ? 0 : -1}};
  const Sent first = Send(row, coded, before, keeps, Level::kBaseline, 1);
  for (const Level level : {Level::kBaseline, Level::kAvx2, Level::kAvx512}) {
    if (level > CurrentLevel()) continue;
    for (const int num_threads : {1, 3}) {
      REQUIRE(Send(row, coded, before, keeps, level, num_threads) == first);
    }
  }
  for (int64_t i = 0; keeps && i < size; ++i) {
    float added = before.gradient[i];
    if (!before.moment.empty()) added = Quotient(before.divisor, added, &before.moment[i]);
    const float value = before.residual[i] + added;
    REQUIRE(first.after.residual[i] == value - first.sums[0][i]);
  }
  if (row.itemsize > 0) return;
  // Whatever words are, nothing outside of memory is read or written.
  Words damaged = first.words;
  for (int64_t i = Below(random, 20); i >= 0 && damaged.size() > kHeaderWords; --i) {
    damaged[kHeaderWords + Below(random, damaged.size() - kHeaderWords)] = random();
  }
  WriteHeader(7, true, damaged.data(), damaged.size());
  Pool pool(3);
  CheckNumber(random, row, coded, first.words, before, pool);
  Buffers buffers;
  const auto num_words = static_cast<int64_t>(damaged.size());
  const std::string wrong =
      buffers.Open(coded, {{damaged.data(), 1, num_words, 7}}, {}, CurrentLevel(), pool);
  REQUIRE(wrong.empty() || row.is_momentum);
  if (!wrong.empty()) return;
  std::vector<float> sum(size);
  std::vector<float> shared = before.shared;
  if (method->num_shared > 0) buffers.Remember({{shared.data()}});
  buffers.Sum({sum.data()}, pool);
}

}  // namespace

void CheckMethods(Random& random) {
  const float words = static_cast<float>(1 + Below(random, 2000));
  const std::vector<Row> rows = {
      {"whole", {INFINITY}},
      {"two_bit", {0.5f}},
      {"ef_sign_sgd", {}},
      {"natural", {}},
      {"sign_sgd", {0, 1}, false},
      {"sign_sgd", {0, 7}, false},
      {"signum", {0, 300, 0.9f, 0.1f}, false},
      {"signum", {2, 0, 0.9f, 0.1f}, false},
      {"uniform_8bit", {100, 0}},
      {"uniform_8bit, stochastic", {0, 300}},
      {"qsgd, fixed", {7, 0, 512, 0, 0}},
      {"qsgd, fixed", {15, 0, 4099, 0, 0}},
      {"qsgd, fixed", {127, 1, 34464, 0, 0}},
      {"qsgd, elias", {7, 0, 512, 16, 0}},
      {"qsgd, elias", {30, 0, 9001, 16, 0}},
      {"qsgd, elias", {300, 1, 34464, 0, words}},
      {"rotated_quantization", {16, 0, 1024}},
      {"rotated_quantization", {5, 0, 2}},
      {"rotated_quantization", {16, 1, 0}},
      {"one_bit", {1}},
      {"one_bit", {0}},
      {"float16", {60000}, true, 2},
      {"bfloat16", {1e30f}, true, 2},
      {"random_k", {0, 0, 1}, true, 4},
      {"random_k", {0, 0, 2.5f}, false, 4},
      {"diana, fixed", {7, 0, 512, 0, 0, 0.3f}, false},
      {"diana, elias", {7, 0, 100, 0, words, 0.3f}, false},
      {"tern_grad, scaler", {0.3f}, false},
      {"tern_grad", {0}, false, 0, {0.7f, 1.3f}},
      {"laq, news", {8}, false, 0, {0.1f, 0}},
      {"laq", {3}, false, 0, {1, 1, 2.5f}},
      {"laq", {8}, false, 0, {0, 1, 2.5f}},
      {"laq", {8}, false, 0, {0, 0, 2.5f}},
      {"ecq, fixed", {7, 0, 5001, 0, 0, 0.2f, 0.9f}, false},
      {"ecq, elias", {7, 0, 100, 0, words, 0.2f, 0.9f}, false},
      {"chunked_top_k", {0, 100, 0, 7, 1, 6, 40, 0, words, 1e30f}},
      {"chunked_top_k", {1, 0, 0, 9000, 1, 16, 4, 0, 40 * words, 100}},
      {"demo", {0, 4, 0, 3, 1, 0, 0, 1e30f, 6, 40, 0, words}, true, 0, {}, true},
      {"demo", {0, 40, 0, 9, 1, 0, 3, 1e3f, 4, 256, 0, 9999}, true, 0, {}, true},
  };
  const FlushDenormals flush;
  for (const Row& row : rows) Check(random, row);
}

}  // namespace tf_dgc
