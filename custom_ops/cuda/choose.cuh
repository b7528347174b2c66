// Exactly k: the cut between what is sent and what is kept, for every tensor.
#ifndef TF_DGC_CUDA_CHOOSE_CUH_
#define TF_DGC_CUDA_CHOOSE_CUH_

#include "crews.cuh"

namespace tf_dgc {
namespace gpu {

constexpr int kCopies = 4;  // of a histogram, as threads that count in the same bucket wait

// What a block chooses with: one after the other.
union ChoosingMemory {
  struct {
    uint64_t keys[kInside];
    uint32_t above[kInside];
  } inside;
  uint32_t histogram[kCopies][kBuckets];
};

TF_DGC_DEVICE void ZeroHistogram(ChoosingMemory& memory) {
  for (int i = ThreadIndex(); i < kCopies * kBuckets; i += kWide) (&memory.histogram[0][0])[i] = 0;
  SyncBlock();
}

TF_DGC_DEVICE void Count(ChoosingMemory& memory, int bucket) {
  AtomicAdd(&memory.histogram[ThreadIndex() % kCopies][bucket], 1);
}

// Adds the block's histogram to the one of all blocks.
TF_DGC_DEVICE void AddHistogram(const ChoosingMemory& memory, uint32_t* histogram) {
  SyncBlock();
  for (int i = ThreadIndex(); i < kBuckets; i += kWide) {
    uint32_t count = 0;
    for (int copy = 0; copy < kCopies; ++copy) count += memory.histogram[copy][i];
    if (count > 0) AtomicAdd(&histogram[i], count);
  }
  SyncBlock();
}

// Has the cut found in the residual: of its magnitude the bits from `shift` on are known.
TF_DGC_DEVICE void ReadResidual(const Tables& t, int tensor, int32_t prefix, int shift,
                                int32_t rank) {
  Choice& choice = t.choices[tensor];
  choice.mode = Mode::kResidual;
  choice.coarse = false;
  choice.prefix = prefix;
  choice.shift = shift;
  choice.rank = rank;
  AtomicAdd(&t.progress->num_residual, 1);
}

TF_DGC_DEVICE void LeaveHint(const Tables& t, int tensor, int32_t next) {
  const Source& source = t.sources[tensor];
  if (source.limit == 0) return;
  const bool was_wrong = t.choices[tensor].had_hint && next == 0;
  const int32_t before = t.hints[tensor].distrust;
  const int32_t distrust = was_wrong ? kDistrust : before > 0 ? before - 1 : 0;
  t.hints[tensor] = {source.k, next, distrust};
}

// Whether the candidates are all that reach the threshold, and enough.
TF_DGC_DEVICE bool Suffices(const Source& source, const Choice& choice) {
  const int64_t count = choice.num_candidates;
  return source.limit > 0 && source.k <= count && count <= source.limit;
}

// Counts the candidates of the spans by bucket.
TF_DGC_DEVICE void CountCandidates(const Tables& t) {
  auto& memory = Shared<ChoosingMemory>();
  ForEachTensor(t, [&](int tensor, int64_t begin, int64_t end, const Crew& crew) {
    const Source& source = t.sources[tensor];
    const Choice& choice = t.choices[tensor];
    if (!choice.coarse || !Suffices(source, choice)) return;
    const Span span = choice.span;
    uint32_t* histogram = HistogramOf(t, source);
    if (crew.is_block()) ZeroHistogram(memory);
    ForEachCandidate(t, tensor, begin, end, crew, [&](const Candidate& candidate) {
      const int32_t magnitude = candidate.magnitude();
      if (!span.Holds(magnitude)) return;
      const int bucket = span.BucketOf(magnitude);
      if (crew.is_block()) {
        Count(memory, bucket);
      } else {
        AtomicAdd(&histogram[bucket], 1);
      }
    });
    if (crew.is_block()) AddHistogram(memory, histogram);
  });
}

// The magnitude that half as many again as k entries reached, or a guess at it.
TF_DGC_DEVICE int32_t NextThreshold(const uint32_t* histogram, const Source& source,
                                    const Choice& choice) {
  const int64_t k = source.k;
  const int64_t rank = k + k / 2 + 1;
  if (choice.num_candidates < rank) {
    return MagnitudeOf(0.95f * BitCast<float>(choice.threshold));
  }
  return choice.span.Of(FindBucket(histogram, static_cast<uint32_t>(rank)).bucket).low;
}

// Narrows a span to the bucket with the cut.
TF_DGC_DEVICE void Narrow(const Tables& t, int tensor, int times) {
  const Source& source = t.sources[tensor];
  Choice& choice = t.choices[tensor];
  if (!choice.coarse) return;
  uint32_t* histogram = HistogramOf(t, source);
  const Found found = FindBucket(histogram, choice.rank);
  for (int i = ThreadIndex(); i < kBuckets; i += kWide) histogram[i] = 0;
  if (ThreadIndex() != 0) return;
  const Span span = choice.span.Of(found.bucket);
  choice.span = span;
  choice.rank = found.rank;
  choice.coarse = found.count > kRanked && !span.single();
  if (choice.coarse) {
    AtomicAdd(&t.progress->num_coarse[times], 1);
  } else if (found.count > kInside) {  // very many of just this magnitude
    ReadResidual(t, tensor, static_cast<int32_t>(span.low), 0, found.rank);
  }
}

// Narrows the span of all candidates, or has the residual read; leaves a hint.
TF_DGC_DEVICE void Decide(const Tables& t, int tensor) {
  const Source& source = t.sources[tensor];
  if (source.exempt() || source.size == 0) return;
  const Choice choice = t.choices[tensor];
  if (Suffices(source, choice)) {
    const int32_t next = NextThreshold(HistogramOf(t, source), source, choice);
    if (ThreadIndex() == 0) LeaveHint(t, tensor, next);
    return Narrow(t, tensor, 0);
  }
  SyncBlock();
  if (ThreadIndex() != 0) return;
  LeaveHint(t, tensor, 0);
  const int64_t count = choice.num_candidates;
  // If all but zeros are candidates, the cut is at zero.
  if (source.limit > 0 && count <= source.limit && choice.threshold == 1) {
    ReadResidual(t, tensor, 0, 0, source.k - static_cast<int32_t>(count));
  } else {
    ReadResidual(t, tensor, 0, 31, source.k);
  }
}

// Finer buckets, until those with the cuts hold few entries, or of one magnitude only.
TF_DGC_DEVICE void NarrowCuts(const Tables& t) {
  for (int times = 1; times < kSpans && t.progress->num_coarse[times - 1] > 0; ++times) {
    CountCandidates(t);
    SyncGrid();
    ForMyTensors(t, [&](int tensor) { Narrow(t, tensor, times); });
    SyncGrid();
  }
}

// Gathers the candidates of the span with the cut, in any order.
TF_DGC_DEVICE void GatherInside(const Tables& t) {
  ForEachTensor(t, [&](int tensor, int64_t begin, int64_t end, const Crew& crew) {
    const Source& source = t.sources[tensor];
    Choice& choice = t.choices[tensor];
    if (source.exempt() || choice.mode != Mode::kListed) return;
    const Span span = choice.span;
    ForEachCandidate(t, tensor, begin, end, crew, [&](const Candidate& candidate) {
      if (!span.Holds(candidate.magnitude())) return;
      InsideOf(t, source)[AtomicAdd(&choice.num_inside, 1)] = candidate;
    });
  });
}

// The cut among the entries of its span: the last entry sent is the one that is
// outranked by exactly rank - 1 others. Ties go to the positions that come first in
// cyclic order from the offset.
TF_DGC_DEVICE void CutInside(const Tables& t, int tensor) {
  const Source& source = t.sources[tensor];
  Choice& choice = t.choices[tensor];
  if (source.exempt() || source.size == 0 || choice.mode != Mode::kListed) return;
  const uint32_t count = choice.num_inside;
  const int32_t offset = t.offsets[tensor];
  auto& memory = Shared<ChoosingMemory>().inside;
  const Candidate* inside = InsideOf(t, source);
  for (uint32_t i = ThreadIndex(); i < count; i += kWide) {
    const int32_t position = inside[i].position;
    const uint32_t distance = position - offset + (position < offset ? source.size : 0);
    const auto magnitude = static_cast<uint32_t>(inside[i].magnitude());
    memory.keys[i] = uint64_t{magnitude} << 32 | ~distance;
    memory.above[i] = 0;
  }
  SyncBlock();
  constexpr uint32_t kShare = 4;  // threads that count for an entry
  for (uint32_t i = ThreadIndex(); i < kShare * count; i += kWide) {
    const uint64_t key = memory.keys[i / kShare];
    uint32_t above = 0;
    for (uint32_t j = i % kShare; j < count; j += kShare) above += memory.keys[j] > key;
    if (above > 0) AtomicAdd(&memory.above[i / kShare], above);
  }
  SyncBlock();
  for (uint32_t i = ThreadIndex(); i < count; i += kWide) {
    if (memory.above[i] == static_cast<uint32_t>(choice.rank) - 1) {
      choice.cut = {inside[i].magnitude(), offset, inside[i].position};
    }
  }
  SyncBlock();
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_CHOOSE_CUH_
