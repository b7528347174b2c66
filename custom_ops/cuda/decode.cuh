// Buffers of all workers: checked, and their positions decoded.
#ifndef TF_DGC_CUDA_DECODE_CUH_
#define TF_DGC_CUDA_DECODE_CUH_

#include "tables.cuh"
#include "wrong.cuh"

namespace tf_dgc {
namespace gpu {

// A tensor of the buffers, and where its sum goes.
struct Target {
  float* target;
  int64_t words;         // from a buffer's first one
  int64_t first_entry;   // entries that tensors before this one send
  int32_t size;
  int32_t k;
  int32_t first_range;  // of kRange entries
  int32_t high;         // words from its first one (Streams)
  int32_t values;
  int32_t end;
  int8_t low_bits;
  int8_t value_type;
  int8_t unused[6];

  TF_DGC_DEVICE bool exempt() const {
    return IsExempt(static_cast<ValueType>(value_type));
  }
  TF_DGC_DEVICE ValueType coded_as() const {
    return CodedAs(static_cast<ValueType>(value_type), false);
  }
};

constexpr int kTargets = 256;  // that fit into a kernel's parameters

struct TargetUpload {
  Target targets[kTargets];
  int32_t first;
};

struct Buffers {
  Target* targets;
  int32_t* first_ranges;  // [num_tensors + 1]
  int32_t* positions;     // [num_workers, num_entries]
  uint32_t* checksums;    // [num_workers]
  TfDgcStatus* status;
  const uint32_t* words;  // [num_workers, num_words]
  const double* rate;     // null: sums are written
  int64_t num_words;
  int64_t num_entries;
  int32_t num_tensors;
  int32_t num_workers;
  int32_t num_ranges;
  uint32_t fingerprint;
};

TF_DGC_DEVICE void Report(const Buffers& b, bool is_wrong, int64_t worker, int64_t index,
                          Wrong wrong) {
  Report(b.status, is_wrong, worker, index, wrong);
}

// Bits of the last word of a stream that are not used, as they are set.
TF_DGC_DEVICE uint32_t Padding(const uint32_t* words, int64_t bits) {
  return bits % 32 == 0 ? 0 : words[bits / 32] >> (bits % 32);
}

TF_DGC_DEVICE uint16_t HalfAt(const uint32_t* words, int64_t i) {
  return static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
}

template <class Format>
TF_DGC_DEVICE float ScaledAt(const uint32_t* values, int64_t k, int64_t i) {
  const int64_t bit = i * Format::kBits;
  const uint32_t code = values[ScaleWords(k) + bit / 32] >> (bit % 32);
  const float unit = UnitOf<Format>(ScaleAt(values, i / kShared));
  return Format::Level(code & ((1u << Format::kBits) - 1)) * unit;
}

// The i-th of k values.
TF_DGC_DEVICE float ValueAt(const uint32_t* values, ValueType type, int64_t k, int64_t i) {
  switch (type) {
    case ValueType::kBFloat16:
      return ToFloat(BFloat16{HalfAt(values, i)});
    case ValueType::kFloat16:
      return ToFloat(Float16{HalfAt(values, i)});
    case ValueType::kMxInt8:
      return ScaledAt<MxInt8>(values, k, i);
    case ValueType::kMxFp4:
      return ScaledAt<MxFp4>(values, k, i);
    case ValueType::kSign:
      return BitCast<float>(values[0] | (values[1 + i / 32] >> (i % 32) & 1) << 31);
    default:
      return BitCast<float>(values[i]);
  }
}

// Adds what a tensor's words contribute to the checksum; the first one's also the header.
TF_DGC_DEVICE void AddChecksum(const Buffers& b, const Target& target, int tensor,
                               const uint32_t* words, int64_t worker) {
  uint32_t sum = 0;
  const int64_t begin = tensor == 0 ? 0 : target.words;
  for (int64_t i = begin + ThreadIndex(); i < target.words + target.end; i += kWide) {
    if (i != 4) sum += (2 * static_cast<uint32_t>(i) + 1) * words[i];
  }
  sum = BlockSum<kWide>(sum);
  if (ThreadIndex() == 0) AtomicAdd(&b.checksums[worker], sum);
}

// Decodes the positions of a tensor; returns how many there are, at most all are written.
TF_DGC_DEVICE int64_t ReadPositions(const Target& target, const uint32_t* words,
                                    int32_t* positions) {
  const int l = target.low_bits;
  const int64_t k = target.k;
  const int64_t high_words = (k + ((target.size - 1) >> l) + 31) / 32;
  uint64_t base = 0;
  for (int64_t first = 0; first < high_words; first += kWide) {
    const int64_t w = first + ThreadIndex();
    uint32_t word = w < high_words ? words[target.high + w] : 0;
    uint32_t total;
    int64_t i = base + BlockExclusiveSum<kWide>(static_cast<uint32_t>(PopCount(word)), &total);
    for (; word != 0; word &= word - 1, ++i) {
      if (i >= k) break;
      const int64_t part = 32 * w + LowestBit(word) - i;
      const int64_t at = i * l;
      // The second word exists: at least one of high bits follows.
      const uint64_t low = words[at / 32] | static_cast<uint64_t>(words[at / 32 + 1]) << 32;
      positions[i] = static_cast<int32_t>(static_cast<uint32_t>(part << l) |
                                          (low >> (at % 32) & ((1u << l) - 1)));
    }
    base += total;
  }
  SyncBlock();
  return base;
}

TF_DGC_DEVICE void CheckPositions(const Buffers& b, const Target& target, int tensor,
                                  const uint32_t* words, int64_t worker) {
  int32_t* positions = b.positions + worker * b.num_entries + target.first_entry;
  const int64_t k = target.k;
  const int l = target.low_bits;
  const int64_t count = ReadPositions(target, words, positions);
  if (ThreadIndex() == 0) {
    const bool padding = Padding(words, k * l) != 0 ||
                         Padding(words + target.high, k + ((target.size - 1) >> l)) != 0;
    Report(b, padding, worker, tensor + 1, Wrong::kPadding);
    Report(b, count > k, worker, tensor + 1, Wrong::kTooMany);
    Report(b, count < k, worker, tensor + 1, Wrong::kTooFew);
  }
  if (count != k) return;
  bool unordered = false;
  bool outside = false;
  for (int64_t i = ThreadIndex(); i < k; i += kWide) {
    unordered |= i > 0 && positions[i] <= positions[i - 1];
    outside |= positions[i] < 0 || positions[i] >= target.size;
  }
  Report(b, unordered, worker, tensor + 1, Wrong::kOrder);
  Report(b, outside, worker, tensor + 1, Wrong::kRange);
}

template <class Format>
TF_DGC_DEVICE void CheckScaled(const Buffers& b, const Target& target, int tensor,
                               const uint32_t* values, int64_t worker) {
  const int64_t blocks = NumScales(target.k);
  if (ThreadIndex() == 0) {
    const bool padding = Padding(values, 8 * blocks) != 0 ||
                         Padding(values + ScaleWords(target.k), Format::kBits * int64_t{target.k}) != 0;
    Report(b, padding, worker, tensor + 1, Wrong::kPadding);
  }
  bool broken = false;
  bool impossible = false;
  for (int64_t i = ThreadIndex(); i < blocks; i += kWide) {
    const uint32_t scale = ScaleAt(values, i);
    broken |= scale == kBrokenScale;
    impossible |= !IsScale<Format>(scale);
  }
  Report(b, broken, worker, tensor + 1, Wrong::kValue);
  Report(b, impossible, worker, tensor + 1, Wrong::kScale);
}

TF_DGC_DEVICE void CheckValues(const Buffers& b, const Target& target, int tensor,
                               const uint32_t* values, int64_t worker) {
  const ValueType type = target.coded_as();
  const int64_t k = target.k;
  if (type == ValueType::kSign) {
    if (ThreadIndex() != 0) return;
    const bool wrong = values[0] >> 31 || !IsFinite(BitCast<float>(values[0]));
    Report(b, wrong, worker, tensor + 1, Wrong::kMagnitude);
    Report(b, Padding(values + 1, k) != 0, worker, tensor + 1, Wrong::kPadding);
    return;
  }
  if (type == ValueType::kMxInt8) return CheckScaled<MxInt8>(b, target, tensor, values, worker);
  if (type == ValueType::kMxFp4) return CheckScaled<MxFp4>(b, target, tensor, values, worker);
  const bool halves = type == ValueType::kBFloat16 || type == ValueType::kFloat16;
  if (halves && ThreadIndex() == 0) {
    Report(b, Padding(values, 16 * k) != 0, worker, tensor + 1, Wrong::kPadding);
  }
  bool wrong = false;
  for (int64_t i = ThreadIndex(); i < k; i += kWide) {
    wrong |= !IsFinite(ValueAt(values, type, k, i));
  }
  Report(b, wrong, worker, tensor + 1, Wrong::kValue);
}

// Before the blocks of Decode add to it.
TF_DGC_GLOBAL(kThreads) Clear(Buffers b) {
  for (int i = ThreadIndex(); i < b.num_workers; i += kThreads) b.checksums[i] = 0;
  if (ThreadIndex() == 0) *b.status = {kRight, 0};
}

// One block per tensor of the upload, and per worker.
TF_DGC_GLOBAL(kWide) Decode(Buffers b, TargetUpload upload) {
  const int tensor = upload.first + static_cast<int>(BlockIndex());
  const int64_t worker = BlockIndexY();
  const Target target = upload.targets[BlockIndex()];
  if (worker == 0 && ThreadIndex() == 0) {
    b.targets[tensor] = target;
    b.first_ranges[tensor] = target.first_range;
    if (tensor == 0) b.first_ranges[b.num_tensors] = b.num_ranges;
  }
  const uint32_t* words = b.words + worker * b.num_words;
  if (tensor == 0) CheckHeader(words, worker, b.fingerprint, b.num_words, b.status);
  AddChecksum(b, target, tensor, words, worker);
  words += target.words;
  if (!target.exempt()) CheckPositions(b, target, tensor, words, worker);
  CheckValues(b, target, tensor, words + target.values, worker);
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_DECODE_CUH_
