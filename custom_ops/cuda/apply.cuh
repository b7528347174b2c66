// Decoded buffers into dense sums, or into variables where something was sent.
#ifndef TF_DGC_CUDA_APPLY_CUH_
#define TF_DGC_CUDA_APPLY_CUH_

#include "decode.cuh"

namespace tf_dgc {
namespace gpu {

constexpr int kRange = 8192;  // entries of a block, whose sums are in shared memory
constexpr int kWorkers = 64;  // looked up at a time

struct ApplyMemory {
  float sums[kRange];
  uint32_t sent[kRange / 32];
  int32_t begins[kWorkers];
  int32_t ends[kWorkers];
};

// Whether all buffers are right; if not, nothing is changed. All threads get the answer.
TF_DGC_DEVICE bool AllRight(const Buffers& b) {
  bool wrong = b.status->error != kRight;
  for (int64_t w = ThreadIndex(); w < b.num_workers; w += kThreads) {
    wrong |= b.checksums[w] != b.words[w * b.num_words + 4];
  }
  return !BlockAny(wrong);
}

// The first index of an ascending sequence whose content is not below a position.
TF_DGC_DEVICE int32_t LowerBound(const int32_t* positions, int32_t count, int32_t position) {
  int32_t low = 0;
  int32_t high = count;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (positions[middle] < position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Subtracts rate * sum, or writes the sum.
TF_DGC_DEVICE void Put(const Buffers& b, float* target, float sum) {
  if (b.rate == nullptr) {
    *target = sum;
  } else {
    *target -= sum * static_cast<float>(*b.rate);
  }
}

TF_DGC_DEVICE void ApplyWhole(const Buffers& b, const Target& target, int64_t begin,
                              int64_t end) {
  for (int64_t i = begin + ThreadIndex(); i < end; i += kThreads) {
    float sum = 0;
    for (int64_t w = 0; w < b.num_workers; ++w) {
      sum += ValueAt(b.words + w * b.num_words + target.words, target.coded_as(), target.k, i);
    }
    Put(b, target.target + i, sum);
  }
}

// Sums are formed in the order of the workers, starting from 0, as everywhere.
TF_DGC_DEVICE void ApplySparse(const Buffers& b, const Target& target, int64_t begin,
                               int64_t end) {
  auto& memory = Shared<ApplyMemory>();
  for (int i = ThreadIndex(); i < kRange; i += kThreads) memory.sums[i] = 0;
  for (int i = ThreadIndex(); i < kRange / 32; i += kThreads) memory.sent[i] = 0;
  const ValueType type = target.coded_as();
  for (int first = 0; first < b.num_workers; first += kWorkers) {
    const int count = b.num_workers - first < kWorkers ? b.num_workers - first : kWorkers;
    const int32_t* positions = b.positions + first * b.num_entries + target.first_entry;
    SyncBlock();
    if (ThreadIndex() < 2 * count) {
      const int w = ThreadIndex() / 2;
      const bool is_end = ThreadIndex() % 2;
      const int32_t at = LowerBound(positions + w * b.num_entries, target.k,
                                    static_cast<int32_t>(is_end ? end : begin));
      (is_end ? memory.ends : memory.begins)[w] = at;
    }
    SyncBlock();
    for (int w = 0; w < count; ++w) {
      if (memory.begins[w] == memory.ends[w]) continue;
      const uint32_t* values = b.words + (first + w) * b.num_words + target.words + target.values;
      for (int32_t i = memory.begins[w] + ThreadIndex(); i < memory.ends[w]; i += kThreads) {
        const int at = static_cast<int>(positions[w * b.num_entries + i] - begin);
        memory.sums[at] += ValueAt(values, type, target.k, i);
        AtomicOr(&memory.sent[at / 32], 1u << (at % 32));
      }
      SyncBlock();
    }
  }
  for (int64_t i = begin + ThreadIndex(); i < end; i += kThreads) {
    const int at = static_cast<int>(i - begin);
    const bool sent = memory.sent[at / 32] >> (at % 32) & 1;
    if (sent || b.rate == nullptr) Put(b, target.target + i, memory.sums[at]);
  }
}

// One block per range of entries, and one for the status.
TF_DGC_GLOBAL(kThreads) Apply(Buffers b) {
  const bool right = AllRight(b);
  if (BlockIndex() == b.num_ranges) {
    for (int64_t w = ThreadIndex(); w < b.num_workers; w += kThreads) {
      const uint32_t* words = b.words + w * b.num_words;
      Report(b, b.checksums[w] != words[4], w, kHeaderIndex, Wrong::kChecksum);
      if (words[2] & kNonFinite) {
        AtomicAdd(reinterpret_cast<uint32_t*>(&b.status->nonfinite), 1);
      }
    }
    return;
  }
  if (!right) return;
  const int tensor = TensorOf(b.first_ranges, b.num_tensors, BlockIndex());
  const Target target = b.targets[tensor];
  const int64_t begin = (BlockIndex() - target.first_range) * kRange;
  const int64_t end = begin + kRange < target.size ? begin + kRange : target.size;
  if (target.exempt()) {
    ApplyWhole(b, target, begin, end);
  } else {
    ApplySparse(b, target, begin, end);
  }
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_APPLY_CUH_
