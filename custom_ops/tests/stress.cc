// Random steps against a plain reference, for every vector level and several numbers of
// threads. Run under the sanitizers: `make -C custom_ops check`.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "check_elias.h"
#include "check_factors.h"
#include "check_finite.h"
#include "check_merge.h"
#include "check_methods.h"
#include "check_numbers.h"
#include "check_positions.h"
#include "check_regions.h"
#include "check_rules.h"
#include "check_selectors.h"
#include "check_sketch.h"
#include "compress.h"
#include "divided.h"
#include "out_of_memory.h"
#include "pool.h"
#include "random.h"
#include "update.h"

namespace tf_dgc {
namespace {

// A tensor of G gradients with A accumulators, before and after a step.
template <class G, class A>
struct Case {
  Tensor tensor;
  std::vector<G> gradient;
  std::vector<A> velocity, residual;
  std::vector<int64_t> rows;  // that are not zero, if the gradient is sparse
  std::vector<G> values;      // of these
  std::vector<A> moment;      // if the gradient is divided

  void Fill(Random& random, GradientType type) {
    const int64_t choices[] = {1, 2, 63, 64, 65, 1000, 4095, 4096, 70000, 200000};
    const int64_t size = choices[Below(random, 10)];
    const int kind = Below(random, 4);
    for (int64_t i = 0; i < size; ++i) {
      gradient.push_back(Convert<G>(DrawNumber(random, kind)));
      velocity.push_back(kind == 0 ? DrawNumber(random, 0) : 0);
      residual.push_back(kind == 0 ? DrawNumber(random, 0) : 0);
    }
    if (Below(random, 4) == 0) {  // with or without the gradient, this may overflow
      const int64_t at = Below(random, size);
      velocity[at] = residual[at] = std::numeric_limits<A>::max();
    }
    const bool exempt = Below(random, 4) == 0;
    const double density = std::pow(10.0, -0.5 * Below(random, 8));
    const int64_t k = std::max<int64_t>(1, density * size);
    const bool wide = type == GradientType::kFloat64;
    ValueType value_type = static_cast<ValueType>(Below(random, kNumValueTypes));
    if (value_type == ValueType::kFloat64 && !wide) value_type = ValueType::kFloat32;
    const ValueType whole[] = {ValueType::kExempt, ValueType::kExemptBFloat16,
                               ValueType::kExemptMxInt8};
    if (exempt || IsExempt(value_type)) value_type = whole[Below(random, 3)];
    tensor = {{size, IsExempt(value_type) ? size : k, wide, value_type}, type,   nullptr, nullptr, nullptr,
              Below(random, 2) ? 1.0 : 0.3,                Below(random, size)};
    if (Below(random, 3) == 0) tensor.largest = 0.5;
    if (Below(random, 3) == 0) MakeSparse(random);
    if (Below(random, 3) > 0) return;
    tensor.divisor = DrawDivisor(random, nullptr);
    for (int64_t i = 0; i < size; ++i) moment.push_back(std::abs(DrawNumber(random, kind)));
  }

  // Lets some rows be zero, and others be all that is handed over.
  void MakeSparse(Random& random) {
    const int64_t size = gradient.size();
    int64_t length = 1 + Below(random, std::min<int64_t>(size, 5000));
    while (size % length != 0) --length;
    tensor.rows = {true, nullptr, 0, length};
    for (int64_t row = 0; row < size / length; ++row) {
      const auto begin = gradient.begin() + row * length;
      if (Below(random, 3) == 0) {
        rows.push_back(row);
      } else {
        std::fill(begin, begin + length, G{});
      }
    }
  }

  void Point(const Settings& settings) {
    tensor.gradient = gradient.data();
    if (tensor.rows.sparse) {
      values.clear();
      for (const int64_t row : rows) {
        const auto begin = gradient.begin() + row * tensor.rows.length;
        values.insert(values.end(), begin, begin + tensor.rows.length);
      }
      tensor.gradient = values.data();
      tensor.rows.indices = rows.data();
      tensor.rows.count = rows.size();
    }
    tensor.velocity = settings.rule == Rule::kNone ? nullptr : velocity.data();
    tensor.residual = residual.data();
    if (!moment.empty()) tensor.divisor.moment = moment.data();
  }

  // Adds the gradient as the paper says, entry by entry, but where the sum would not be
  // finite; returns whether all were.
  bool Accumulate(const Settings& settings) {
    bool finite = !std::isnan(tensor.scale);
    for (size_t i = 0; i < gradient.size(); ++i) {
      A g = static_cast<A>(tensor.scale) * static_cast<A>(ToFloat(gradient[i]));
      if (std::isnan(tensor.scale)) g = 0;
      if (!moment.empty()) g = Quotient(tensor.divisor, g, &moment[i]);
      A u = velocity[i];
      A sum = residual[i] + Added(settings, g, &u);
      if (!std::isfinite(sum)) {
        finite = false;
        u = velocity[i];
        sum = residual[i] + Added(settings, 0, &u);
        if (!std::isfinite(sum)) sum = residual[i];
      }
      velocity[i] = u;
      residual[i] = sum;
    }
    return finite;
  }

  static A Added(const Settings& settings, A gradient, A* u) {
    const A m = static_cast<A>(settings.momentum);
    if (settings.rule == Rule::kMomentum) return *u = m * *u + gradient;
    if (settings.rule == Rule::kNone) return gradient;
    *u = m * (*u + gradient);
    return *u + gradient;
  }

  A AtMostLargest(A value) const {
    const A largest = static_cast<A>(tensor.largest);
    return std::max(-largest, std::min(largest, value));
  }

  // Takes out what is sent, by sorting everything.
  void Send(const Settings& settings, const Entries<A>& sent) {
    const Layout& layout = tensor.layout;
    if (layout.exempt()) {
      for (int64_t i = 0; i < layout.size; ++i) {
        REQUIRE(layout.value_type != ValueType::kExempt ||
                sent.values[i] == AtMostLargest(residual[i]));
        residual[i] -= sent.values[i];
      }
      return;
    }
    std::vector<int32_t> order(layout.size);
    std::iota(order.begin(), order.end(), 0);
    const auto rank = [&](int32_t i) {
      const int64_t cyclic = (i - tensor.offset + layout.size) % layout.size;
      return std::make_pair(-std::abs(residual[i]), cyclic);
    };
    std::sort(order.begin(), order.end(), [&](int a, int b) { return rank(a) < rank(b); });
    order.resize(layout.k);
    std::sort(order.begin(), order.end());
    REQUIRE(std::equal(order.begin(), order.end(), sent.positions.begin()));
    for (int64_t i = 0; i < layout.k; ++i) {
      REQUIRE(std::abs(sent.values[i]) <= std::abs(AtMostLargest(INFINITY)));
      residual[order[i]] -= sent.values[i];
      const bool masks = settings.factor_masking && layout.k < layout.size;
      if (settings.rule != Rule::kNone && masks) velocity[order[i]] = 0;
    }
  }
};

template <class G, class A>
void Check(Random& random, GradientType type, bool poison) {
  Settings settings{static_cast<Rule>(Below(random, 3)), 0.75, Below(random, 2) == 0, 7,
                    Level::kBaseline};
  std::vector<Case<G, A>> cases(1 + Below(random, 3));
  for (auto& c : cases) c.Fill(random, type);
  if (poison) {
    auto& gradient = cases.back().gradient;
    cases.back().tensor.rows = {};
    // A quotient has bounds, so whoever divides looks before.
    if (!cases.back().moment.empty()) cases.back().tensor.scale = NAN;
    const double bad = Below(random, 2) ? NAN : INFINITY;
    gradient[Below(random, gradient.size())] = Convert<G>(bad);
  }
  auto expected = cases;
  bool finite = true;
  for (auto& c : expected) finite &= c.Accumulate(settings);
  REQUIRE(!(finite && poison));

  std::vector<Layout> layout;
  for (const auto& c : cases) layout.push_back(c.tensor.layout);
  std::vector<uint32_t> first;
  std::vector<Case<G, A>> after;
  // Right ones are those of the run before, of the same tensors.
  std::vector<Hint> hints(cases.size());
  for (size_t t = 0; t < cases.size(); ++t) {
    const A magnitude = static_cast<A>(std::pow(10.0, Below(random, 5) - 3.0));
    if (Below(random, 2)) hints[t] = {layout[t].k, MagnitudeOf(magnitude), Below(random, 2)};
  }
  for (const Level level : {Level::kBaseline, Level::kAvx2, Level::kAvx512}) {
    if (level > CurrentLevel()) continue;
    settings.level = level;
    for (const int num_threads : {1, 3}) {
      Pool pool(num_threads);
      after = cases;
      std::vector<Tensor> tensors;
      for (auto& c : after) {
        c.Point(settings);
        tensors.push_back(c.tensor);
      }
      std::vector<uint32_t> words(BufferWords(layout));
      Compress(tensors, settings, pool, hints, words.data());
      if (first.empty()) first = words;
      REQUIRE(words == first);
    }
  }

  bool flag = false;
  REQUIRE(ReadHeader(first.data(), first.size(), first.size(), 7, &flag).empty());
  REQUIRE(flag == finite);
  const uint32_t* words = first.data() + kHeaderWords;
  for (size_t t = 0; t < cases.size(); ++t) {
    Entries<A> sent;
    REQUIRE(ReadTensor(layout[t], words, &sent).empty());
    words += TensorWords(layout[t]);
    expected[t].Send(settings, sent);
    REQUIRE(after[t].residual == expected[t].residual);
    if (settings.rule != Rule::kNone) REQUIRE(after[t].velocity == expected[t].velocity);
    REQUIRE(after[t].moment == expected[t].moment);
  }

  // Two workers that sent the same: sums and updates.
  Pool pool(3);
  std::vector<uint32_t> both = first;
  both.insert(both.end(), first.begin(), first.end());
  Decoded decoded;
  REQUIRE(decoded.Decode(layout, both.data(), 2, first.size(), 7, pool).empty());
  REQUIRE(decoded.num_nonfinite() == (finite ? 0 : 2));
  std::vector<std::vector<A>> sums, weights, dense;
  std::vector<void*> sum_data, weight_data;
  for (const Layout& tensor : layout) {
    sums.emplace_back(tensor.size, A(NAN));
    weights.emplace_back(tensor.size, A(0.5));
  }
  for (size_t t = 0; t < layout.size(); ++t) {
    sum_data.push_back(sums[t].data());
    weight_data.push_back(weights[t].data());
  }
  decoded.Sum(sum_data, pool);
  decoded.Descend(weight_data, 0.25, pool);
  for (size_t t = 0; t < layout.size(); ++t) {
    for (int64_t i = 0; i < layout[t].size; ++i) {
      REQUIRE(weights[t][i] == A(0.5) - A(0.25) * sums[t][i]);
    }
  }
  REQUIRE(decoded.Decode(layout, first.data(), 1, first.size(), 7, pool).empty());
  decoded.Sum(sum_data, pool);
  for (auto& values : weights) std::fill(values.begin(), values.end(), A(1) / A(3));
  decoded.Put(weight_data, pool);
  for (size_t t = 0; t < layout.size(); ++t) {
    std::replace(weights[t].begin(), weights[t].end(), A(1) / A(3), A(0));
    REQUIRE(weights[t] == sums[t]);
  }
}

void CheckRows() {
  const auto valid = [](std::vector<int64_t> rows) {
    return Rows{true, rows.data(), static_cast<int64_t>(rows.size()), 1}.AreValid(3);
  };
  REQUIRE(valid({}) && valid({0, 2}) && valid({0, 1, 2}));
  REQUIRE(!valid({-1}) && !valid({3}) && !valid({1, 1}) && !valid({2, 0}));
}

void Run(int64_t rounds) {
  CheckNumbers();
  CheckRows();
  CheckOutOfMemory();
  Random random(1);
  for (int64_t i = 0; i < rounds; ++i) {
    const bool poison = i % 4 == 3;
    Check<float, float>(random, GradientType::kFloat32, poison);
    Check<double, double>(random, GradientType::kFloat64, poison);
    Check<BFloat16, float>(random, GradientType::kBFloat16, poison);
    Check<Float16, float>(random, GradientType::kFloat16, poison);
    CheckRules(random);
    for (int j = 0; j < 10; ++j) CheckElias(random);
    CheckMethods(random);
    CheckSelectors(random);
    CheckSketch(random);
    CheckFactors(random);
    for (int j = 0; j < 10; ++j) CheckMerge(random);
    for (int j = 0; j < 10; ++j) CheckRegions(random);
    for (int j = 0; j < 10; ++j) CheckFinite(random);
    for (int j = 0; j < 10; ++j) CheckPositions(random);
  }
  std::printf("%ld rounds passed, up to vector level %s\n", static_cast<long>(4 * rounds),
              LevelName(CurrentLevel()));
}

}  // namespace
}  // namespace tf_dgc

int main(int argc, char** argv) { tf_dgc::Run(argc > 1 ? std::atoll(argv[1]) : 100); }
