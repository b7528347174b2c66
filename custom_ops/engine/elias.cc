#include "elias.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tf_dgc {
namespace {

#define TF_DGC_LOOPS "elias_loops.inc"
#include "every_level.inc"
#undef TF_DGC_LOOPS

int Log2(int64_t number) { return 63 - __builtin_clzll(number); }

// Writes bits from `at` on into a stream of zeros. Words at both ends may be others', too.
void Copy(const uint8_t* bytes, int64_t count, uint32_t* stream, int64_t at) {
  const Bits bits{bytes, (count + 7) / 8 * 8};
  for (int64_t done = 0; done < count;) {
    const int64_t begin = at + done;
    const int room = 32 - static_cast<int>(begin % 32);
    const int taken = static_cast<int>(std::min<int64_t>(room, count - done));
    const auto part = static_cast<uint32_t>(bits.At(done) & ((uint64_t{1} << taken) - 1));
    uint32_t* word = stream + begin / 32;
    if (taken == 32) {
      *word = part;
    } else {
      __atomic_fetch_or(word, part << (begin % 32), __ATOMIC_RELAXED);
    }
    done += taken;
  }
}

void Copy(const BitWriter& from, uint32_t* stream, int64_t at) {
  Copy(from.bytes(), from.count(), stream, at);
}

void CopyNumber(uint64_t number, int count, uint32_t* stream, int64_t at) {
  uint8_t bytes[8];
  std::memcpy(bytes, &number, 8);
  Copy(bytes, count, stream, at);
}

}  // namespace

int64_t Bits::Behind(int64_t ones, int64_t at) const {
  constexpr int kTaken = 56;
  for (; ones > 0 && at < count; at += kTaken) {
    uint64_t bits = At(at) & ((uint64_t{1} << kTaken) - 1);
    const int found = __builtin_popcountll(bits);
    if (found >= ones) {
      for (; ones > 1; --ones) bits &= bits - 1;
      return at + __builtin_ctzll(bits) + 1;
    }
    ones -= found;
  }
  return std::min(at, count);
}

void EliasChunk::Reserve() {
  for (BitWriter* writer : {&signs, &unary[0], &unary[1], &low[0], &low[1]}) writer->Reserve();
}

EliasReader::EliasReader(const uint32_t* words, int64_t num_words, int64_t size, int64_t part,
                         Level level)
    : bits_{reinterpret_cast<const uint8_t*>(words + 1), 32 * (num_words - 1)}, part_(part) {
  num_ = std::max<int64_t>(static_cast<int32_t>(words[0]), 0);
  num_ = std::min({num_, size, bits_.count});
  magnitudes_ = bits_.Behind(num_, num_);
  const int64_t low = bits_.Behind(num_, magnitudes_);
  low_magnitudes_ = low + (magnitudes_ - num_) - num_;
  const auto skip = TF_DGC_OF_LEVEL(level, Skip);
  const int64_t num_parts = (size + part - 1) / part;
  places_.reserve(num_parts);
  EliasPlace place{0, -1, num_, low, magnitudes_};
  int64_t counted = 0;  // entries whose magnitudes are before place.magnitude
  const auto add_until = [&](int64_t until) {
    place.magnitude = bits_.Behind(place.entry - counted, place.magnitude);
    counted = place.entry;
    places_.resize(std::min(until, num_parts), place);
  };
  int64_t behind = 0;  // the parts that have a place
  while (place.entry < num_ && behind < size) {
    skip(bits_, num_, behind, &place);
    if (place.entry == num_) break;
    EliasNumbers next(bits_, place.distance, bits_, place.low);
    const int64_t position = place.position + next.Next();
    if (position >= behind) {
      add_until(position / part + 1);
      behind = part * static_cast<int64_t>(places_.size());
    }
    place = {place.entry + 1, position, next.at(), next.at_low(), place.magnitude};
  }
  add_until(num_parts);
}

EliasChunk* Output<Elias>::Of(int64_t job) {
  const auto share = [&](int64_t i) {
    return words_ + num_words_ * i / static_cast<int64_t>(chunks_.size());
  };
  std::fill(share(job), share(job + 1), 0);
  return &chunks_[job];
}

void Output<Elias>::Cut() {
  int64_t room = 32 * (num_words_ - 1), before = -1;
  for (EliasChunk& chunk : chunks_) {
    const EliasChunk all = std::move(chunk);
    chunk = EliasChunk();
    for (EliasCursor next(all); !next.ends(); ++next) {
      const EliasChunk::Entry& entry = *next;
      room -= 3 + 2 * (Log2(entry.position - before) + Log2(std::abs(entry.level)));
      before = entry.position;
      if (room < 0) break;
      chunk.Reserve();
      chunk.Add(entry);
    }
  }
}

Output<Elias>::Start Output<Elias>::Place() {
  Start end{};
  int64_t before = -1;
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const EliasChunk& chunk = chunks_[i];
    starts_[i] = end;
    if (chunk.count == 0) continue;
    starts_[i].distance = static_cast<uint32_t>(chunk.first - before);
    const int64_t widths[] = {chunk.widths[0] + Log2(chunk.first - before), chunk.widths[1]};
    for (const int what : {0, 1}) {
      end.unary[what] += chunk.count + widths[what];
      end.low[what] += widths[what];
    }
    end.signs += chunk.count;
    before = chunk.last;
  }
  return end;
}

void Output<Elias>::Agree() {
  const auto bits = [](const Start& end) {
    return end.signs + end.unary[0] + end.unary[1] + end.low[0] + end.low[1];
  };
  Start end = Place();
  if (bits(end) > 32 * (num_words_ - 1)) {
    Cut();
    end = Place();
  }
  words_[0] = static_cast<uint32_t>(end.signs);
  const int64_t low = end.signs + end.unary[0] + end.unary[1];
  for (Start& start : starts_) {
    start.unary[0] += end.signs;
    start.unary[1] += end.signs + end.unary[0];
    start.low[0] += low;
    start.low[1] += low + end.low[0];
  }
}

void Output<Elias>::Join(int64_t job) const {
  const EliasChunk& chunk = chunks_[job];
  if (chunk.count == 0) return;
  const Start& start = starts_[job];
  uint32_t* stream = words_ + 1;
  const int width = Log2(start.distance);
  CopyNumber(uint64_t{1} << width, width + 1, stream, start.unary[0]);
  CopyNumber(start.distance ^ 1u << width, width, stream, start.low[0]);
  Copy(chunk.unary[0], stream, start.unary[0] + width + 1);
  Copy(chunk.low[0], stream, start.low[0] + width);
  Copy(chunk.signs, stream, start.signs);
  Copy(chunk.unary[1], stream, start.unary[1]);
  Copy(chunk.low[1], stream, start.low[1]);
}

}  // namespace tf_dgc
