#include "check_methods.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "denormals.h"
#include "elias.h"
#include "engine.h"
#include "pool.h"
#include "wire.h"

namespace tf_dgc {
namespace {

using Levels = std::vector<int32_t>;
using Words = std::vector<uint32_t>;

// The code as `tf_dgc/codecs/elias.py` describes it, bit by bit; what does not fit becomes 0.
Words Coded(Levels* levels, int64_t num_words) {
  std::vector<bool> signs, unary[2], low[2];
  int64_t bits = 0, before = -1;
  for (int64_t i = 0; i < static_cast<int64_t>(levels->size()); ++i) {
    int32_t& level = (*levels)[i];
    if (level == 0) continue;
    const int64_t numbers[] = {i - before, std::abs(level)};
    before = i;
    bits += 3;
    for (const int64_t number : numbers) bits += 2 * std::ilogb(number);
    if (bits > 32 * (num_words - 1)) {
      level = 0;
      continue;
    }
    signs.push_back(level < 0);
    for (const int what : {0, 1}) {
      const int width = std::ilogb(numbers[what]);
      for (int bit = 0; bit <= width; ++bit) unary[what].push_back(bit == width);
      for (int bit = 0; bit < width; ++bit) low[what].push_back(numbers[what] >> bit & 1);
    }
  }
  Words words(num_words);
  words[0] = signs.size();
  int64_t at = 32;
  for (const auto& stream : {signs, unary[0], unary[1], low[0], low[1]}) {
    for (const bool bit : stream) {
      words[at / 32] |= static_cast<uint32_t>(bit) << at % 32;
      ++at;
    }
  }
  return words;
}

void CheckElias(Random& random) {
  const int64_t size = 1 + Below(random, 3000), job = 32 * (1 + Below(random, 40));
  const int64_t jobs = (size + job - 1) / job, rarity = 1 + Below(random, 200);
  Levels levels(size);
  for (int32_t& level : levels) {
    const int64_t most = Below(random, 10) == 0 ? 1 << 24 : 2;
    if (Below(random, rarity) == 0) level = Below(random, 2 * most + 1) - most;
  }
  const Elias codes{1 + Below(random, 3 * size / 32 + 2)};
  Words words(codes.words, 99);
  Output<Elias> output(codes, words.data(), jobs);
  for (int64_t j = 0; j < jobs; ++j) {
    EliasChunk* chunk = output.Of(j);
    for (int64_t i = j * job; i < std::min(size, (j + 1) * job); ++i) {
      chunk->Add(i, levels[i] != 0, &levels[i]);
    }
  }
  Levels expected = levels;
  const Words reference = Coded(&expected, codes.words);
  output.Agree();
  Levels left(size);
  for (int64_t j = 0; j < jobs; ++j) {
    output.Join(j);
    for (const auto& [position, level] : output.Entries(j)) left[position] = level;
  }
  REQUIRE(left == expected);
  REQUIRE(words == reference);

  const bool damaged = Below(random, 3) == 0;
  for (int64_t i = Below(random, 8); damaged && i >= 0; --i) {
    words[Below(random, codes.words)] = static_cast<uint32_t>(random());
  }
  const EliasReader reader = codes.Open(words.data(), size, job);
  for (int64_t begin = 0; begin < size; begin += job) {
    const int64_t end = std::min(size, begin + job);
    Levels part(end - begin);
    reader.ForEach(begin, end, [&](int64_t i, int32_t level) {
      REQUIRE(i >= 0 && begin + i < end);
      part[i] = level;
    });
    REQUIRE(damaged || std::equal(part.begin(), part.end(), expected.begin() + begin));
  }
}

// A method, and what holds of it.
struct Row {
  const char* name;
  std::vector<float> parameters;
  bool keeps = true;  // whether it may be used with a residual
};

// What a worker has before and after a step.
struct Worker {
  std::vector<float> gradient, residual;
  std::vector<std::vector<float>> states;

  Source From(bool keeps) {
    std::vector<float*> pointers;
    for (auto& state : states) pointers.push_back(state.data());
    return {int64_t(gradient.size()), GradientType::kFloat32, gradient.data(), 1.0f, Rule::kNone,
            0, nullptr, keeps ? residual.data() : nullptr, pointers};
  }
};

struct Sent {
  Words words;
  Worker after;
  std::vector<float> sums[2];  // of one and of two workers

  bool operator==(const Sent& other) const {
    return words == other.words && after.residual == other.after.residual &&
           after.states == other.after.states && sums[0] == other.sums[0] &&
           sums[1] == other.sums[1];
  }
};

std::vector<float> SumOf(const std::vector<tf_dgc::Coded>& coded, const Words& words,
                         int64_t num_workers, Level level, Pool& pool) {
  Buffers buffers;
  const int64_t num_words = words.size() / num_workers;
  REQUIRE(buffers.Open(coded, words.data(), num_workers, num_words, {}, 7, level, pool).empty());
  std::vector<float> sum(coded[0].setup.size);
  const auto finite = buffers.Sum({sum.data()}, pool);
  REQUIRE(finite == buffers.AreFinite(pool));
  return sum;
}

Sent Send(const std::vector<tf_dgc::Coded>& coded, const Worker& before, bool keeps, Level level,
          int num_threads) {
  Pool pool(num_threads);
  Sent sent{Words(NumWords(coded)), before, {}};
  REQUIRE(Encode(coded, {sent.after.From(keeps)}, 7, level, pool, sent.words.data(), {})
              .all_taken);
  Words both = sent.words;
  both.insert(both.end(), sent.words.begin(), sent.words.end());
  sent.sums[0] = SumOf(coded, sent.words, 1, level, pool);
  sent.sums[1] = SumOf(coded, both, 2, level, pool);
  return sent;
}

void Check(Random& random, const Row& row) {
  const int64_t sizes[] = {1, 31, 64, 100, 1023, 1024, 5000, 5001, 9999, 70001};
  const int64_t size = sizes[Below(random, 10)];
  const Method* method = FindMethod(row.name);
  REQUIRE(method != nullptr);
  Worker before;
  const int kind = Below(random, 4);
  for (int64_t i = 0; i < size; ++i) {
    before.gradient.push_back(DrawNumber(random, kind));
    before.residual.push_back(DrawNumber(random, 0));
  }
  before.states.assign(method->num_states, before.residual);
  const bool keeps = row.keeps && Below(random, 2) == 0;
  const int64_t columns = size % 5 == 0 ? 5 : 1;
  const Draw draw(1, Below(random, 9), 0, 0);
  const std::vector<tf_dgc::Coded> coded = {{method, {size, columns, row.parameters, draw}}};
  const Sent first = Send(coded, before, keeps, Level::kBaseline, 1);
  for (const Level level : {Level::kBaseline, Level::kAvx2, Level::kAvx512}) {
    if (level > CurrentLevel()) continue;
    for (const int num_threads : {1, 3}) {
      REQUIRE(Send(coded, before, keeps, level, num_threads) == first);
    }
  }
  for (int64_t i = 0; keeps && i < size; ++i) {
    const float value = before.residual[i] + before.gradient[i];
    REQUIRE(first.after.residual[i] == value - first.sums[0][i]);
  }
  // Whatever words are, nothing outside of memory is read or written.
  Words damaged = first.words;
  for (int64_t i = Below(random, 20); i >= 0 && damaged.size() > kHeaderWords; --i) {
    damaged[kHeaderWords + Below(random, damaged.size() - kHeaderWords)] = random();
  }
  WriteHeader(7, true, damaged.data(), damaged.size());
  Pool pool(3);
  Buffers buffers;
  REQUIRE(buffers.Open(coded, damaged.data(), 1, damaged.size(), {}, 7, CurrentLevel(), pool)
              .empty());
  std::vector<float> sum(size);
  buffers.Sum({sum.data()}, pool);
}

}  // namespace

void CheckMethods(Random& random) {
  for (int i = 0; i < 10; ++i) CheckElias(random);
  const float words = static_cast<float>(1 + Below(random, 2000));
  const std::vector<Row> rows = {
      {"whole", {INFINITY}},
      {"two_bit", {0.5f}},
      {"ef_sign_sgd", {}},
      {"natural", {}},
      {"sign_sgd", {}, false},
      {"signum", {0.9f, 0.1f}, false},
      {"uniform_8bit", {0}},
      {"uniform_8bit, stochastic", {300}},
      {"qsgd, fixed", {7, 512, 0, 0}},
      {"qsgd, fixed", {127, 100000, 0, 0}},
      {"qsgd, elias", {7, 512, 1, 0}},
      {"qsgd, elias", {300, 100000, 0, words}},
      {"rotated_quantization", {16, 1024}},
      {"rotated_quantization", {5, 2}},
      {"rotated_quantization", {16, 65536}},
      {"ecq, fixed", {7, 512, 0, 0, 0.2f, 0.9f}, false},
      {"ecq, elias", {7, 100, 0, words, 0.2f, 0.9f}, false},
  };
  const FlushDenormals flush;
  for (const Row& row : rows) Check(random, row);
}

}  // namespace tf_dgc
