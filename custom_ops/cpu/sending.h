// Takes chosen entries out of a tensor's residual and codes them.
#ifndef TF_DGC_CPU_SENDING_H_
#define TF_DGC_CPU_SENDING_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "loops.h"
#include "parallel.h"
#include "select.h"
#include "taking.h"
#include "values.h"
#include "wire.h"

namespace tf_dgc {

template <class A>
class Sender {
 public:
  // Where `velocity` is not null, it is cleared where entries are sent. What is sent of an
  // entry is at most `largest`.
  Sender(const Layout& layout, A* residual, A* velocity, A largest, Threads& threads,
         uint32_t* words)
      : layout_(layout),
        residual_(residual),
        velocity_(velocity),
        largest_(largest),
        threads_(threads),
        words_(words) {}

  // Sends all entries of an exempt tensor.
  void SendWhole() {
    std::vector<A> values(residual_, residual_ + layout_.size);
    for (A& value : values) value = std::clamp(value, -largest_, largest_);
    WriteValues(layout_, values.data(), words_);
    for (int64_t i = 0; i < layout_.size; ++i) residual_[i] -= values[i];
  }

  // Sends the candidates.
  void Send(const std::vector<Found<A>>& parts) {
    std::vector<int32_t> positions;
    positions.reserve(layout_.k);
    for (const Found<A>& found : parts) {
      for (int64_t i = 0; i < found.count; ++i) {
        positions.push_back(found.candidates[i].position);
      }
    }
    WritePositions(layout_, positions.data(), words_);
    values_.Allocate(layout_.k);
    ForEachJob(threads_, (layout_.k + kSendJob - 1) / kSendJob, [&](int64_t job) {
      const int64_t begin = job * kSendJob;
      const int64_t count = std::min(layout_.k - begin, kSendJob);
      TakeEach(positions.data() + begin, count, values_.data() + begin);
    });
    Code();
    if (IsShared(layout_.value_type)) Subtract(positions.data(), layout_.k, 0);
  }

  // Sends the entries whose bits are set, k of them, a word per block.
  void SendMany(const std::vector<uint64_t>& taken, Level level) {
    const auto take = GetTake<A>(layout_.value_type, level);
    ClearPositions(layout_, words_);
    values_.Allocate(layout_.k);
    ForEachPart(taken, [&](int64_t first_block, const std::vector<int32_t>& positions,
                           int64_t first, int64_t count) {
      PositionWriter writer(layout_, first, words_);
      for (int64_t i = 0; i < count; ++i) writer.Add(positions[i]);
      A* values = values_.data() + first;
      if (count < kPart / kFew || (first_block + kBlocks) * kBlock > layout_.size) {
        return TakeEach(positions.data(), count, values);
      }
      const A* end = values + count;
      for (int64_t block = first_block; values < end; ++block) {
        A coded[kBlock];
        const int64_t at = block * kBlock;
        A* velocity = velocity_ == nullptr ? nullptr : velocity_ + at;
        take({taken[block], residual_ + at, velocity, largest_}, coded);
        for (uint64_t bits = taken[block]; bits != 0; bits &= bits - 1) {
          *values++ = coded[__builtin_ctzll(bits)];
        }
      }
    });
    Code();
    if (!IsShared(layout_.value_type)) return;
    ForEachPart(taken, [&](int64_t, const std::vector<int32_t>& positions, int64_t first,
                           int64_t count) { Subtract(positions.data(), count, first); });
  }

 private:
  static constexpr int64_t kSendJob = 1 << 12;
  static constexpr int64_t kCodeJob = 16 * kPartValues;
  static constexpr int64_t kAhead = 16;
  static constexpr int64_t kBlocks = kPart / kBlock;
  static constexpr int64_t kFew = 12;  // of fewer than one in so many, each is taken by itself

  // Calls work(block, positions, first, count) of all parts: their first block, the positions
  // whose bits are set, the number of those before and their own.
  template <class Work>
  void ForEachPart(const std::vector<uint64_t>& taken, Work work) {
    const int64_t num_blocks = taken.size();
    std::vector<int64_t> before{0};
    for (int64_t block = 0; block < num_blocks; ++block) {
      if (block % kBlocks == 0) before.push_back(before.back());
      before.back() += __builtin_popcountll(taken[block]);
    }
    ForEachJob(threads_, before.size() - 1, [&](int64_t part) {
      const int64_t begin = part * kBlocks, end = std::min(num_blocks, begin + kBlocks);
      const int64_t count = before[part + 1] - before[part];
      std::vector<int32_t> positions(count + kAtOnce);
      int32_t* next = positions.data();
      for (int64_t block = begin; block < end; ++block) {
        next = AddPositions(taken[block], static_cast<int32_t>(block * kBlock), next);
      }
      work(begin, positions, before[part], count);
    });
  }

  // Writes where bits are set; a few at once, of which those that are too many are
  // overwritten, since branches that depend on the bits take longer.
  static constexpr int kAtOnce = 4;
  static int32_t* AddPositions(uint64_t bits, int32_t at, int32_t* next) {
    int32_t* const end = next + __builtin_popcountll(bits);
    while (next < end) {
      for (int i = 0; i < kAtOnce; ++i, bits &= bits - 1) {
        next[i] = at + (bits == 0 ? 0 : __builtin_ctzll(bits));
      }
      next += kAtOnce;
    }
    return end;
  }

  // Takes values out of the residual, each by itself, and leaves there what coding loses.
  void TakeEach(const int32_t* positions, int64_t count, A* values) {
    WithType(layout_.value_type,
             [&](auto type) { TakeAs<type.value>(positions, count, values); });
  }

  // Positions are far apart in memory, so it asks ahead.
  template <ValueType kType>
  void TakeAs(const int32_t* positions, int64_t count, A* values) {
    for (int64_t i = 0; i < count; ++i) {
      const int32_t ahead = positions[std::min(i + kAhead, count - 1)];
      __builtin_prefetch(residual_ + ahead);
      if (velocity_ != nullptr) __builtin_prefetch(velocity_ + ahead);
      const int32_t position = positions[i];
      const A value = residual_[position];
      values[i] = Coding<A, kType>::Coded(std::clamp(value, -largest_, largest_));
      residual_[position] = Coding<A, kType>::Kept(value, values[i]);
      if (velocity_ != nullptr) velocity_[position] = 0;
    }
  }

  // Codes the values, on all threads unless all of them share a magnitude.
  void Code() {
    if (layout_.value_type == ValueType::kSign) {
      return WriteValues(layout_, values_.data(), words_);
    }
    uint32_t* words = words_ + StreamsOf(layout_).values;
    ForEachJob(threads_, (layout_.k + kCodeJob - 1) / kCodeJob, [&](int64_t job) {
      const int64_t first = job * kCodeJob, count = std::min(layout_.k - first, kCodeJob);
      EncodePart(layout_, first, count, values_.data() + first, words);
    });
  }

  // Takes coded values out of the residual, from the `first`-th on.
  void Subtract(const int32_t* positions, int64_t count, int64_t first) {
    for (int64_t i = 0; i < count; ++i) residual_[positions[i]] -= values_[first + i];
  }

  const Layout layout_;
  A* const residual_;
  A* const velocity_;
  const A largest_;
  Threads& threads_;
  uint32_t* const words_;
  Numbers<A> values_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_SENDING_H_
