#include "check_elias.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "elias.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tf_dgc {
namespace {

#define TF_DGC_LOOPS "packing_loops.inc"
#include "every_level.inc"
#undef TF_DGC_LOOPS

using Levels = std::vector<int32_t>;
using Words = std::vector<uint32_t>;

// The code as `tf_dgc/codecs/elias_gamma.py` describes it, bit by bit; what does not fit becomes 0.
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

}  // namespace

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
    for (auto next = output.Entries(j); !next.ends(); ++next) {
      left[(*next).position] = (*next).level;
    }
  }
  REQUIRE(left == expected);
  REQUIRE(words == reference);

  const bool damaged = Below(random, 3) == 0;
  for (int64_t i = Below(random, 8); damaged && i >= 0; --i) {
    words[Below(random, codes.words)] = static_cast<uint32_t>(random());
  }
  for (const Level level : {Level::kBaseline, Level::kAvx2, Level::kAvx512}) {
    if (level > CurrentLevel()) continue;
    const EliasReader reader = codes.Open(words.data(), size, job, level);
    for (int64_t begin = 0; begin < size; begin += job) {
      const int64_t end = std::min(size, begin + job);
      Levels part(end - begin), places(end - begin + 8), found(end - begin + 8);
      const int64_t count = TF_DGC_OF_LEVEL(level, ReadLevels)(reader, begin, end, places.data(),
                                                               found.data());
      for (int64_t i = 0; i < count; ++i) {
        REQUIRE(places[i] >= 0 && begin + places[i] < end);
        part[places[i]] = found[i];
      }
      REQUIRE(damaged || std::equal(part.begin(), part.end(), expected.begin() + begin));
    }
  }
}

}  // namespace tf_dgc
