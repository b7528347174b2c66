#include "two_sizes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "elias.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tf_dgc {
namespace {

#define TF_DGC_TARGET
#include "packing_loops.inc"
#undef TF_DGC_TARGET

// Powers of 2^0.25 up to 1; the first is 0.
std::array<double, 256> MakeShares() {
  const double roots[] = {1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429};
  std::array<double, 256> shares{};
  for (int i = 1; i < 256; ++i) shares[i] = std::ldexp(roots[(i + 1) % 4], (i + 1) / 4 - 64);
  return shares;
}
const std::array<double, 256> kShares = MakeShares();

uint8_t ScaleOf(double mean, float largest) {
  const double ratio = largest == 0 ? 0 : mean / largest;
  const double octaves = std::log(std::max(ratio, 1e-300)) / std::log(2.0);
  return static_cast<uint8_t>(std::min(std::max(std::nearbyint(255 + 4 * octaves), 0.0), 255.0));
}

}  // namespace

void TwoSizes::Write(const Chunks& chunks, const Turned& turned,
                     const std::vector<double>& means, float* values, uint32_t* words) const {
  const auto largest = static_cast<float>(*std::max_element(means.begin(), means.end()));
  const int64_t k = chunks.Sent();
  std::fill(words, words + CodesAt(chunks), 0);
  auto* scales = reinterpret_cast<uint8_t*>(words + 3);
  std::vector<int32_t> codes(k + 64);
  double sums[2] = {}, counts[2] = {};
  const auto unit_of = [&](int64_t chunk) {
    return kShares[scales[chunk]] * static_cast<double>(largest);
  };
  const auto for_each = [&](const auto& work) {
    for (int64_t chunk = 0, i = 0; chunk < chunks.count; ++chunk) {
      const double unit = unit_of(chunk);
      for (const int64_t end = i + chunks.SentOf(chunk); i < end; ++i) work(unit, i, turned.Of(i));
    }
  };
  for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
    scales[chunk] = ScaleOf(means[chunk], largest);
  }
  for_each([&](double unit, int64_t i, int64_t at) {
    const double multiple = unit == 0 ? 0 : std::abs(static_cast<double>(values[i])) / unit;
    const bool above = multiple >= 1;
    codes[at] = (values[i] < 0) + 2 * above;
    sums[above] += multiple;
    ++counts[above];
  });
  float head[3] = {largest};
  for (int i = 0; i < 2; ++i) {
    head[1 + i] = static_cast<float>(counts[i] == 0 ? 0 : sums[i] / counts[i]);
  }
  std::memcpy(words, head, sizeof(head));
  Pack(codes_, codes.data(), 0, k, k, words + CodesAt(chunks));
  for_each([&](double unit, int64_t i, int64_t at) {
    values[i] = Value(unit, head + 1, codes[at]);
  });
}

void TwoSizes::Read(const Chunks& chunks, const Turned& turned, const uint32_t* words,
                    const int32_t* positions, float* values) const {
  const int64_t k = chunks.Sent();
  float head[3];
  std::memcpy(head, words, sizeof(head));
  const auto* scales = reinterpret_cast<const uint8_t*>(words + 3);
  std::vector<int32_t> codes(k + 64);
  Unpack(codes_, words + CodesAt(chunks), 0, k, k, codes.data());
  float of_codes[4] = {};
  for (int64_t i = 0, behind = 0; i < turned.count; ++i) {
    if (positions[i] >= behind) {
      const int64_t chunk = positions[i] / chunks.length;
      const double unit = static_cast<double>(head[0]) * kShares[scales[chunk]];
      for (int code = 0; code < 4; ++code) of_codes[code] = Value(unit, head + 1, code);
      behind = (chunk + 1) * chunks.length;
    }
    values[i] = of_codes[codes[turned.Of(i)]];
  }
}

}  // namespace tf_dgc
