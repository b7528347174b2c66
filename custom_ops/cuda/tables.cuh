// What the kernels of a step share: tensors, tiles and where they are in the workspace.
#ifndef TF_DGC_CUDA_TABLES_CUH_
#define TF_DGC_CUDA_TABLES_CUH_

#include <cmath>

#include "api.h"
#include "blocks.h"
#include "compress.h"
#include "entries.cuh"
#include "span.cuh"

namespace tf_dgc {
namespace gpu {

constexpr int kWide = 1024;     // of kernels that choose
constexpr int kRanked = 256;    // entries that are ranked at once, without finer buckets
constexpr int kInside = 2048;   // of the same magnitude, that a block can rank
constexpr int kSpans = 4;       // times that buckets are made, the first among them
constexpr int kDistrust = 16;   // steps after a hint was wrong
constexpr int32_t kInfinity = Magnitude<float>::kInfinity;

constexpr int kMaxSample = 8192;  // entries; of a tensor up to this size all are looked at
constexpr int kRun = 4;           // neighbours in the sample, from one sector

TF_DGC_EVERYWHERE inline int SampleSize(int64_t size) {
  if (size <= kMaxSample) return static_cast<int>(size);
  const int64_t wanted = size / 256;
  return (wanted < 1024 ? 1024 : wanted < kMaxSample ? wanted : kMaxSample) / kRun * kRun;
}

// The rank in the sample of a magnitude that a few more than k entries are likely to reach.
TF_DGC_EVERYWHERE inline int64_t SampleRank(int64_t size, int64_t k) {
  if (size <= kMaxSample) return k + k / 2 + 1;
  // As many of the sample reach the k-th largest magnitude as a Poisson variable of this
  // mean; four standard deviations more make fewer than k candidates rare.
  const double mean = static_cast<double>(SampleSize(size)) * k / size;
  return static_cast<int64_t>(ceil(mean + 4 * sqrt(mean) + 4));
}

// How many candidates there may be; 0 if the residual is read in any case. Where more than
// an eighth is sent (warm-up), or half of a small tensor, lists would cost more than that.
inline int64_t CandidateLimit(int64_t size, int64_t k) {
  constexpr int64_t kSmall = 1 << 14;
  if (k > (size > kSmall ? size / 8 : size / 2)) return 0;
  // Three times what is expected to be listed: a rank among few says little.
  const int64_t limit = kSmall + 3 * size * SampleRank(size, k) / SampleSize(size);
  return limit < size ? limit : size;
}

// A tensor of the step as the kernels know it.
struct Source {
  const void* gradient;
  float* velocity;
  float* residual;
  float* moment;          // null if the gradient is not divided
  const double* divisor;
  int64_t first_entry;  // entries that tensors before this one send
  int64_t words;        // where its words start in the buffer
  int64_t candidates;   // where its list starts
  int32_t size;
  int32_t k;
  int32_t first_tile;
  int32_t limit;     // entries of its list
  int32_t index;     // among the tensors that are not exempt
  int32_t high;      // words from its first one (Streams)
  int32_t values;
  int32_t end;
  int32_t first_block;  // blocks of values with a scale that tensors before this one send
  float largest;     // what is sent of an entry at most
  int8_t low_bits;
  int8_t gradient_type;
  int8_t value_type;
  int8_t unused[5];  // named, so that no word is read of which a part was not written

  TF_DGC_DEVICE bool exempt() const {
    return IsExempt(static_cast<ValueType>(value_type));
  }
  TF_DGC_DEVICE ValueType coded_as() const {
    return CodedAs(static_cast<ValueType>(value_type), false);
  }
  // Whether its words are set bit by bit: not where all are numbers of 32 bits.
  TF_DGC_DEVICE bool sets_bits() const {
    return value_type != static_cast<int8_t>(ValueType::kExempt);
  }
  TF_DGC_DEVICE bool sign() const { return value_type == static_cast<int8_t>(ValueType::kSign); }
  TF_DGC_EVERYWHERE bool has_blocks() const {
    return value_type == static_cast<int8_t>(ValueType::kMxInt8) ||
           value_type == static_cast<int8_t>(ValueType::kMxFp4);
  }
  // Whether what a value is coded as depends on others.
  TF_DGC_DEVICE bool shared() const { return IsShared(static_cast<ValueType>(value_type)); }
  TF_DGC_EVERYWHERE int64_t num_blocks() const {
    return has_blocks() ? NumScales(k) : 0;
  }
};

struct Candidate {
  float value;
  int32_t position;  // within the tensor

  TF_DGC_DEVICE int32_t magnitude() const { return MagnitudeOf(value); }
};

// Entries of a tile that may be sent: a part of the tensor's list, by position.
struct Tile {
  uint32_t start;
  uint32_t count;
  uint32_t sent;      // entries sent, then those sent before it in its block's tiles
};

// Which entries are sent: those above a magnitude, and of those that have just this one
// the ones from `first` to `last`, around the end if first > last.
struct Cut {
  int32_t magnitude;
  int32_t first;
  int32_t last;

  TF_DGC_DEVICE bool Takes(int32_t m, int32_t position) const {
    if (m != magnitude) return m > magnitude;
    return first <= last ? first <= position && position <= last
                         : first <= position || position <= last;
  }
};

enum class Mode : int32_t {
  kListed,    // chosen among the candidates
  kResidual,  // the residual is read
};

// How far the choice for a tensor has come.
struct Choice {
  uint32_t num_candidates;
  uint32_t num_inside;  // candidates in the span
  int32_t threshold;    // candidates are of at least this magnitude
  Span span;            // that holds the cut, of candidates
  int32_t rank;         // of the cut within the span or prefix, from 1
  int32_t prefix;       // the digits of the cut's magnitude that are known
  int32_t shift;        // bits that are not
  int32_t had_hint;
  int32_t coarse;       // the span is to be counted by its buckets
  Mode mode;
  Cut cut;
  float mean;  // magnitude of signs
};

struct Progress {
  uint32_t nonfinite;  // not 0: gradients were left out
  uint32_t num_residual;  // tensors of Mode::kResidual
  uint32_t num_coarse[kSpans];  // tensors whose span has to be counted, the how manieth time
};

// Everything of a step that lies on the device.
struct Tables {
  Source* sources;
  int32_t* first_tiles;  // [num_tensors + 1]
  Choice* choices;
  Progress* progress;
  uint32_t* histograms;  // [num_compressed, kBuckets]
  Tile* tiles;
  double* tile_sums;   // [tiles], of magnitudes that are sent as signs
  uint32_t* largest;   // [blocks with a scale], bits of magnitudes
  Candidate* candidates;
  Candidate* inside;      // [num_compressed, kInside]
  uint32_t* block_sent;   // [blocks]
  const double* scales;
  const int32_t* offsets;
  TfDgcHint* hints;
  uint32_t* words;
  int64_t num_words;
  int32_t num_tensors;
  int32_t num_tiles;
  int32_t num_compressed;
  int32_t num_sign;
  int32_t num_shared;  // tensors whose values are coded once all are known
  int32_t num_blocks;  // with a scale
  Rule rule;
  float momentum;
  bool factor_masking;
  uint32_t fingerprint;
};

TF_DGC_DEVICE int64_t NumTiles(const Source& source) {
  return (int64_t{source.size} + kTile - 1) / kTile;
}

TF_DGC_DEVICE uint32_t* HistogramOf(const Tables& t, const Source& source) {
  return t.histograms + int64_t{source.index} * kBuckets;
}

TF_DGC_DEVICE Candidate* InsideOf(const Tables& t, const Source& source) {
  return t.inside + int64_t{source.index} * kInside;
}

// The bucket with the entry of this rank, counted from the highest bucket's entries, its
// rank within the bucket, and how many that holds. Call it with all kWide threads of a block.
struct Found {
  int32_t bucket;
  int32_t rank;
  uint32_t count;
};

struct BucketMemory {
  Found found;
};

TF_DGC_DEVICE Found FindBucket(const uint32_t* histogram, uint32_t rank) {
  static_assert(kBuckets == 2 * kWide, "a thread has two buckets");
  auto& memory = Shared<BucketMemory>();
  const int top = kBuckets - 1 - 2 * ThreadIndex();
  const uint32_t counts[2] = {histogram[top], histogram[top - 1]};
  uint32_t total;
  uint32_t above = BlockExclusiveSum<kWide>(counts[0] + counts[1], &total);
  for (int i = 0; i < 2; ++i) {
    if (above < rank && rank <= above + counts[i]) {
      memory.found = {top - i, static_cast<int32_t>(rank - above), counts[i]};
    }
    above += counts[i];
  }
  SyncBlock();
  const Found found = memory.found;
  SyncBlock();
  return found;
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_TABLES_CUH_
