#include "check_sketch.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "denormals.h"
#include "engine.h"
#include "pool.h"
#include "sketch.h"

namespace tf_dgc {
namespace {

using Floats = std::vector<float>;

struct Problem {
  int64_t places, cells, rows;
  Floats gradient, residual, velocity;
  bool keeps;

  int64_t size() const { return gradient.size(); }
  std::vector<Coded> Told(const Floats& numbers) const {
    const Floats parameters = {float(places >> 16), float(places & 0xffff), 0, float(cells),
                               float(rows)};
    const Draw draw(3, 5, 2, 0);
    return {{FindMethod("count_sketch"), {size(), 1, parameters, draw, numbers}, 0,
             FindMethod("count_sketch, table"), 0}};
  }
  Source From() {
    const Rule rule = keeps ? Rule::kMomentum : Rule::kNone;
    return {size(), GradientType::kFloat32, gradient.data(), 0.5f, rule, 0.75f,
            keeps ? velocity.data() : nullptr, keeps ? residual.data() : nullptr, {}, true};
  }
};

struct Sent {
  Floats vectors[2], notes, residual, velocity, sum;

  bool operator==(const Sent& other) const {
    return vectors[0] == other.vectors[0] && vectors[1] == other.vectors[1] &&
           residual == other.residual && velocity == other.velocity && sum == other.sum;
  }
};

Sent Send(Problem problem, Level level, int num_threads) {
  Pool pool(num_threads);
  Sent sent;
  for (const int round : {0, 1}) {
    const Floats& all = sent.vectors[0];
    const auto told = problem.Told(round ? Floats(all.begin() + 1, all.end()) : Floats());
    Floats& vector = sent.vectors[round];
    vector.resize(NumSummed(told, 0, round));
    const Vector data = {reinterpret_cast<char*>(vector.data()), 4};
    sent.notes = Encode(told, {problem.From()}, 7, level, pool, nullptr, {data}, round).notes;
  }
  auto told = problem.Told(sent.notes);
  told[0].vector = 1;
  std::vector<Vector> vectors;
  for (Floats& vector : sent.vectors) {
    vectors.push_back({reinterpret_cast<char*>(vector.data()), 4});
  }
  Buffers buffers;
  const Gathered none{nullptr, 0, 0, 7};
  REQUIRE(buffers.Open(told, {none, none}, vectors, level, pool).empty());
  sent.sum.resize(problem.size());
  REQUIRE(buffers.Sum({sent.sum.data()}, pool)[0]);
  sent.residual = problem.residual;
  sent.velocity = problem.velocity;
  return sent;
}

// Of at least k estimates, the k largest were found, and what is there was sent.
void CheckFound(const Problem& problem, const Sent& sent) {
  const FlushDenormals flush;
  const Sketch sketch(problem.rows, problem.cells, Draw(3, 5, 2, 0), Level::kBaseline);
  std::vector<int32_t> keys, positions;
  for (int64_t i = 0; i < problem.size(); ++i) {
    keys.push_back(sketch.KeyOf(sent.vectors[0].data() + 1, i));
  }
  for (const float note : sent.notes) positions.push_back(BitCast<int32_t>(note));
  REQUIRE(int64_t(positions.size()) == problem.places);
  REQUIRE(std::adjacent_find(positions.begin(), positions.end(), std::greater_equal<>()) ==
          positions.end());
  std::vector<int32_t> sorted = keys, found;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  for (const int32_t at : positions) found.push_back(keys[at]);
  std::sort(found.begin(), found.end(), std::greater<>());
  REQUIRE(std::equal(found.begin(), found.end(), sorted.begin()));
  for (int64_t i = 0; problem.keeps && i < problem.size(); ++i) {
    const float velocity = 0.75f * problem.velocity[i] + 0.5f * problem.gradient[i];
    REQUIRE(sent.residual[i] == problem.residual[i] + velocity - sent.sum[i]);
  }
}

}  // namespace

void CheckSketch(Random& random) {
  const int64_t sizes[] = {10, 4096, 5001, 70001};
  Problem problem{};
  const int64_t size = sizes[Below(random, 4)];
  problem.places = 1 + Below(random, size);
  problem.cells = 1 + Below(random, size);
  problem.rows = 1 + 2 * Below(random, 3);
  problem.keeps = Below(random, 2) == 0;
  const int kind = Below(random, 4);
  for (int64_t i = 0; i < size; ++i) {
    problem.gradient.push_back(DrawNumber(random, kind));
    problem.residual.push_back(DrawNumber(random, kind));
    problem.velocity.push_back(DrawNumber(random, kind));
  }
  const Sent first = Send(problem, Level::kBaseline, 1);
  CheckFound(problem, first);
  for (const Level level : {Level::kBaseline, Level::kAvx2, Level::kAvx512}) {
    if (level > CurrentLevel()) continue;
    for (const int num_threads : {1, 3}) REQUIRE(Send(problem, level, num_threads) == first);
  }
}

}  // namespace tf_dgc
