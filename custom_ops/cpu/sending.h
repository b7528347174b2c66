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
    const bool shared = IsShared(layout_.value_type);
    if (shared) values_.Allocate(layout_.k);
    // The second half of the last word may be unused.
    if (!shared && layout_.k > 0) words_[StreamsOf(layout_).end - 1] = 0;
    ClearPositions(layout_, words_);
    const Many many{taken, GetTake<A>(layout_.value_type, level), GetPositions(level)};
    const std::vector<int64_t> ranks = RanksOfParts(taken, GetCount(level));
    ForEachJob(threads_, ranks.size() - 1, [&](int64_t part) {
      PositionWriter writer(layout_, ranks[part], part * kPart, words_);
      SendPart(many, part, ranks[part], ranks[part + 1] - ranks[part], writer);
    });
    if (!shared) return;
    Code();
    ForEachJob(threads_, ranks.size() - 1, [&](int64_t part) {
      const auto positions = PositionsOf(taken, part * kBlocks, EndOf(part));
      Subtract(positions.data(), positions.size(), ranks[part]);
    });
  }

 private:
  static constexpr int64_t kSendJob = 1 << 12;
  static constexpr int64_t kCodeJob = 16 * kPartValues;
  static constexpr int64_t kAhead = 16;
  static constexpr int64_t kBlocks = kPart / kBlock;
  static constexpr int64_t kFew = 24;  // of fewer than one in so many, each is taken by itself
  static constexpr int64_t kStep = 32;  // blocks whose values stay in the first-level cache

  // What is sent of a tensor of which much is.
  struct Many {
    const std::vector<uint64_t>& taken;
    TakeFunction<A> take;
    PositionsFunction write_positions;
  };

  // The number of entries before each part, and of all.
  static std::vector<int64_t> RanksOfParts(const std::vector<uint64_t>& taken,
                                           CountFunction count) {
    const int64_t num_blocks = taken.size();
    std::vector<int64_t> ranks{0};
    for (int64_t at = 0; at < num_blocks; at += kBlocks) {
      ranks.push_back(ranks.back() + count(&taken[at], std::min(kBlocks, num_blocks - at)));
    }
    return ranks;
  }

  // The number of the block behind a part; of the tensor's last one, if that is not full.
  int64_t EndOf(int64_t part) const {
    return std::min((layout_.size + kBlock - 1) / kBlock, (part + 1) * kBlocks);
  }

  void SendPart(const Many& many, int64_t part, int64_t rank, int64_t count,
                PositionWriter& writer) {
    const int64_t begin = part * kBlocks, end = EndOf(part);
    const int64_t full = count < kPart / kFew ? begin : std::min(end, layout_.size / kBlock);
    many.write_positions(many.taken.data(), begin, full, writer);
    A coded[kStep * kBlock + kSlack];
    for (int64_t at = begin; at < full; at += kStep) {
      const Blocks<A> blocks{many.taken.data(), at,        std::min(full, at + kStep),
                             residual_,         velocity_, largest_};
      const int64_t taken = many.take(blocks, coded);
      Store(rank, taken, coded);
      rank += taken;
    }
    const auto positions = PositionsOf(many.taken, full, end);
    for (const int32_t position : positions) writer.Add(position);
    std::vector<A> others(positions.size());
    TakeEach(positions.data(), positions.size(), others.data());
    Store(rank, positions.size(), others.data());
  }

  // Where bits are set, in some blocks.
  static std::vector<int32_t> PositionsOf(const std::vector<uint64_t>& taken, int64_t begin,
                                          int64_t end) {
    std::vector<int32_t> positions;
    positions.reserve(begin == end ? 0 : kPart / kFew);
    for (int64_t block = begin; block < end; ++block) {
      for (uint64_t bits = taken[block]; bits != 0; bits &= bits - 1) {
        positions.push_back(static_cast<int32_t>(block * kBlock + __builtin_ctzll(bits)));
      }
    }
    return positions;
  }

  // Keeps coded values for what they share, or writes them.
  void Store(int64_t rank, int64_t count, const A* coded) {
    if (IsShared(layout_.value_type)) {
      std::copy(coded, coded + count, values_.data() + rank);
    } else {
      StoreValues(layout_, rank, count, coded, words_ + StreamsOf(layout_).values);
    }
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
