#include "check_factors.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine.h"
#include "factors.h"
#include "pool.h"

namespace tf_dgc {
namespace {

struct Problem {
  int64_t rows, columns, rank;
  Floats gradient, residual, q;
  bool keeps;

  int64_t size() const { return rows * columns; }
  std::vector<Coded> Told(const Floats& numbers) const {
    const Draw draw(3, 5, 2, 0);
    return {{FindMethod("power_sgd"), {size(), columns, {float(rank)}, draw, numbers}, 0,
             FindMethod("power_sgd, left"), 0}};
  }
  Source From() {
    return {size(),      GradientType::kFloat32, gradient.data(), 0.5f,
            Rule::kNone, 0.0f,                   nullptr,         keeps ? residual.data() : nullptr,
            {},          false};
  }
  std::vector<double> Values() const {
    std::vector<double> values(size());
    for (int64_t i = 0; i < size(); ++i) {
      values[i] = 0.5 * gradient[i] + (keeps ? residual[i] : 0);
    }
    return values;
  }
};

struct Sent {
  Floats vectors[2], basis, residual, sum;

  bool operator==(const Sent& other) const {
    return vectors[0] == other.vectors[0] && vectors[1] == other.vectors[1] &&
           residual == other.residual && sum == other.sum;
  }
};

Sent Send(Problem problem, Level level, int num_threads) {
  Pool pool(num_threads);
  Sent sent;
  for (const int round : {0, 1}) {
    const Floats& left = sent.vectors[0];
    const auto told =
        problem.Told(round ? Floats(left.begin() + 1, left.end()) : problem.q);
    Floats& vector = sent.vectors[round];
    vector.resize(NumSummed(told, 0, round));
    const Vector data = {reinterpret_cast<char*>(vector.data()), 4};
    sent.basis = Encode(told, {problem.From()}, 7, level, pool, nullptr, {data}, round).notes;
  }
  auto told = problem.Told(sent.basis);
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
  return sent;
}

void CheckNear(double value, double expected, double scale) {
  REQUIRE(std::abs(value - expected) <= 1e-4 * scale + 1e-30);
}

double LargestOf(const std::vector<double>& values) {
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

bool IsZero(const float* values, int64_t n) {
  return std::all_of(values, values + n, [](float x) { return x == 0; });
}

// Whether P has rows that are 0, and others: then the basis need not be orthonormal.
bool HasZeroRows(const Problem& problem, const float* p) {
  int64_t zero = 0;
  for (int64_t r = 0; r < problem.rows; ++r) zero += IsZero(p + r * problem.rank, problem.rank);
  return 0 < zero && zero < problem.rows;
}

void CheckOrthonormal(const Problem& problem, const Floats& basis) {
  for (int64_t j = 0; j < problem.rank; ++j) {
    for (int64_t k = 0; k <= j; ++k) {
      double product = 0;
      for (int64_t r = 0; r < problem.rows; ++r) {
        product += double(basis[r * problem.rank + j]) * basis[r * problem.rank + k];
      }
      CheckNear(product, j == k, 1);
    }
  }
}

// Of what was sent, every part follows from those before.
void CheckProducts(const Problem& problem, const Sent& sent) {
  const std::vector<double> values = problem.Values();
  const int64_t rows = problem.rows, columns = problem.columns, rank = problem.rank;
  const double scale = LargestOf(values) * std::sqrt(double(rows + columns));
  if (!HasZeroRows(problem, sent.vectors[0].data() + 1)) CheckOrthonormal(problem, sent.basis);
  for (int64_t r = 0; r < rows; ++r) {
    const auto row = values.begin() + r * columns;
    if (!std::all_of(row, row + columns, [](double x) { return x == 0; })) continue;
    REQUIRE(IsZero(sent.sum.data() + r * columns, columns));
  }
  for (int64_t k = 0; k < rank; ++k) {
    for (int64_t r = 0; r < rows; ++r) {
      double left = 0;
      for (int64_t c = 0; c < columns; ++c) {
        left += values[r * columns + c] * problem.q[c * rank + k];
      }
      CheckNear(sent.vectors[0][1 + r * rank + k], left, scale);
    }
    for (int64_t c = 0; c < columns; ++c) {
      double right = 0;
      for (int64_t r = 0; r < rows; ++r) {
        right += values[r * columns + c] * sent.basis[r * rank + k];
      }
      CheckNear(sent.vectors[1][1 + c * rank + k], right, scale);
    }
  }
  for (int64_t i = 0; i < problem.size(); ++i) {
    double product = 0;
    for (int64_t k = 0; k < rank; ++k) {
      product += double(sent.basis[i / columns * rank + k]) *
                 sent.vectors[1][1 + i % columns * rank + k];
    }
    CheckNear(sent.sum[i], product, scale);
    if (problem.keeps) CheckNear(sent.residual[i] + sent.sum[i], values[i], scale);
  }
}

}  // namespace

void CheckFactors(Random& random) {
  Problem problem{};
  const int64_t lengths[] = {2, 3, 17, 64, 300, 1100};
  problem.rows = lengths[Below(random, 6)];
  problem.columns = lengths[Below(random, 6)];
  problem.rank = 1 + Below(random, std::min<int64_t>(4, std::min(problem.rows, problem.columns)));
  problem.keeps = Below(random, 2) == 0;
  for (int64_t i = 0; i < problem.size(); ++i) {
    problem.gradient.push_back(DrawNumber(random, 0));
    problem.residual.push_back(DrawNumber(random, 0));
  }
  // Rows without a gradient, sometimes most of them, and the first one with any odds.
  const int64_t idle = Below(random, 2) ? 1 + Below(random, 9) : 0;
  for (int64_t r = 0; r < problem.rows; ++r) {
    if (Below(random, 10) >= idle) continue;
    std::fill_n(problem.gradient.begin() + r * problem.columns, problem.columns, 0.0f);
    std::fill_n(problem.residual.begin() + r * problem.columns, problem.columns, 0.0f);
  }
  for (int64_t i = 0; i < problem.columns * problem.rank; ++i) {
    problem.q.push_back(Below(random, 2001) / 1000.0f - 1);
  }
  if (Below(random, 4) == 0) std::fill(problem.q.begin(), problem.q.end(), 0.0f);
  const Sent first = Send(problem, Level::kBaseline, 1);
  CheckProducts(problem, first);
  for (const Level level : {Level::kBaseline, Level::kAvx2, Level::kAvx512}) {
    if (level > CurrentLevel()) continue;
    for (const int num_threads : {1, 3}) REQUIRE(Send(problem, level, num_threads) == first);
  }
}

}  // namespace tf_dgc
