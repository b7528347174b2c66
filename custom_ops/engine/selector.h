// Methods that send some entries. A method is a class like `Selector`, which ranks entries by
// keys and codes the values of those that are sent; what reads memory, finds the largest keys,
// codes positions and keeps the rest is here, once for all of them.
//
// A tensor's words are positions by Elias-Fano, and then values. Where the number of entries
// varies, free places are taken by positions beyond the tensor (compressors/common/capacity.py).
#ifndef TF_DGC_ENGINE_SELECTOR_H_
#define TF_DGC_ENGINE_SELECTOR_H_

#include <algorithm>
#include <cmath>
#include <functional>

#include "elias.h"
#include "inlined.h"
#include "method.h"
#include "packing.h"
#include "ranking.h"
#include "selecting_decoder.h"
#include "selector_base.h"
#include "selection.h"
#include "values.h"
#include "wire.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tf_dgc {

// Memory of a part, which stays in the second-level cache.
struct SelectorScratch {
  std::vector<float> values, before;
  std::vector<int32_t> keys;
  std::vector<Candidate<float>> candidates;
  std::vector<uint32_t> drawn;

  static SelectorScratch& Of(int64_t n) {
    thread_local SelectorScratch scratch;
    const size_t size = n + 64;
    if (scratch.values.size() < size) {
      for (auto* v : {&scratch.values, &scratch.before}) v->resize(size);
      scratch.keys.resize(size);
      scratch.candidates.resize(size);
      scratch.drawn.resize(size);
    }
    return scratch;
  }
};

#define TF_DGC_LOOPS "selector_loops.inc"
#include "every_level.inc"
#undef TF_DGC_LOOPS

template <class M>
class SelectingEncoder : public Encoder {
 public:
  SelectingEncoder(const Setup& setup, const Source& source, Level level, void* words)
      : method_(setup),
        source_(source),
        level_(level),
        part_(std::max<int64_t>(1, (1 << 12) / method_.unit) * method_.unit),
        job_(std::max<int64_t>(1, kPart / part_) * part_),
        words_(static_cast<uint32_t*>(words)),
        partials_(NumJobs()),
        left_out_(NumJobs()),
        sampled_(method_.sample) {
    for (auto& found : found_) found.resize(NumJobs());
    if (!measures()) Start();
  }

  int64_t NumJobs() const override { return (source_.size + job_ - 1) / job_; }
  bool measures() const override { return method_.sample > 0; }

  // The sample's entries, 4096 in each turn.
  void Measure(int64_t job) override {
    constexpr int64_t kTurn = 1 << 12;
    SelectorScratch& scratch = SelectorScratch::Of(kTurn);
    for (int64_t at = job * kTurn; at < method_.sample; at += NumJobs() * kTurn) {
      const int64_t n = std::min(kTurn, method_.sample - at);
      TF_DGC_OF_LEVEL(level_, DrawPositions)
      (method_.stream, at, n, source_.size, scratch.drawn.data());
      Peek(source_, scratch.drawn.data(), n, level_, scratch.values.data());
      for (int64_t i = 0; i < n; ++i) sampled_[at + i] = MagnitudeOf(scratch.values[i]);
    }
  }

  void Agree() override {
    const auto at = sampled_.begin() + method_.rank - 1;
    std::nth_element(sampled_.begin(), at, sampled_.end(), std::greater<>());
    method_.least = std::max(method_.least, *at);
    Start();
  }

  void Encode(int64_t job) override {
    SelectorScratch& scratch = SelectorScratch::Of(part_);
    const int64_t end = std::min(source_.size, (job + 1) * job_);
    for (int64_t begin = job * job_; begin < end; begin += part_) {
      const int64_t n = std::min(part_, end - begin);
      Select(job, LoadPart(job, begin, n, &scratch), &scratch);
    }
  }

  void Finish(Threads& threads) override {
    typename M::Partial all{};
    for (const auto& partial : partials_) M::Merge(partial, &all);
    method_.Agree(all);
    const Layout& layout = method_.layout;
    for (int side = 0; side < M::kSides; ++side) {
      const int32_t least = std::max(method_.least, rankings_[side].threshold());
      KeepLargest(source_.size, layout.k, method_.offset, least, &found_[side], threads);
    }
    const int side = M::kSides > 1 && MeanKey(found_[M::kSides - 1]) > MeanKey(found_[0]);
    Selection chosen = Positions(found_[side], source_.size, layout.k);
    if constexpr (!M::kRanksParts) {
      const auto is_free = [&](int64_t i) { return method_.Key(ValueAt(source_, i), side) == 0; };
      if (layout.size == source_.size) {
        Fill(source_.size, method_.offset, is_free, &chosen);
      }
    }
    num_sent_ = chosen.count;
    WritePositions(layout, chosen.positions.data(), words_);
    std::vector<float> values(layout.k);
    ForEachChosen(chosen, source_, threads,
                  [&](int64_t i, int64_t at) { values[i] = ValueAt(source_, at); });
    method_.Write(side, values.data(), words_ + StreamsOf(layout).values);
    Keep(chosen, values, threads);
  }

  bool left_out() const override {
    return std::any_of(left_out_.begin(), left_out_.end(), [](char left) { return left; });
  }

  int64_t num_sent() const override { return num_sent_; }

 private:
  void Start() {
    for (Ranking& ranking : rankings_) ranking.Start(method_.layout.k, method_.least);
  }

  // What was accumulated stays in the residual, if there is one.
  SelectedPart<M> LoadPart(int64_t job, int64_t begin, int64_t n, SelectorScratch* scratch) {
    const bool keeps = source_.residual != nullptr;
    float* values = keeps ? source_.residual + begin : scratch->values.data();
    if (M::kRanksParts) {
      float* before = scratch->before.data();
      if (keeps) std::copy(values, values + n, before);
      if (!keeps) std::fill(before, before + n, 0.0f);
    }
    left_out_[job] |= Load(source_, begin, begin + n, level_, values);
    float* state = M::kStates ? source_.states[0] + begin : nullptr;
    return {values, scratch->before.data(), state, begin, n, &partials_[job]};
  }

  void Select(int64_t job, const SelectedPart<M>& part, SelectorScratch* scratch) {
    for (int side = 0; side < M::kSides; ++side) {
      const int64_t count = TF_DGC_OF_LEVEL(level_, SelectPart<M>)
      (method_, part, side, rankings_[side].threshold(), scratch);
      if (count == 0) continue;
      Found<float>& found = found_[side][job];
      const Candidate<float>* candidates = scratch->candidates.data();
      found.candidates.insert(found.candidates.end(), candidates, candidates + count);
      found.count += count;
      rankings_[side].Add(candidates, candidates + count);
    }
  }

  // Takes what a decoder sees out of the residual.
  void Keep(const Selection& chosen, const std::vector<float>& seen, Threads& threads) {
    // With every entry sent, masking would erase the momentum of all of them.
    const bool masks = source_.factor_masking && source_.rule != Rule::kNone &&
                       chosen.count < source_.size;
    if (source_.residual == nullptr && !masks && M::kStates == 0) return;
    ForEachChosen(chosen, source_, threads, [&](int64_t i, int64_t at) {
      if (M::kStates) {
        float* state = source_.states[0] + at;
        *state = method_.After(ValueAt(source_, at), seen[i], *state);
      }
      if (source_.residual != nullptr) source_.residual[at] -= seen[i];
      if (masks) source_.velocity[at] = 0;
    });
  }

  M method_;
  const Source source_;
  const Level level_;
  const int64_t part_;
  const int64_t job_;
  uint32_t* const words_;
  std::vector<Found<float>> found_[M::kSides];
  Ranking rankings_[M::kSides];
  std::vector<typename M::Partial> partials_;
  std::vector<char> left_out_;
  std::vector<int32_t> sampled_;
  int64_t num_sent_ = 0;
};

template <class M>
struct RegisteredSelector : Registered {
  explicit RegisteredSelector(const char* name)
      : Registered(name, {NumWords, nullptr, MakeEncoder, MakeDecoder, M::kStates}) {}

  static int64_t NumWords(const Setup& setup) {
    const M method(setup);
    return StreamsOf(method.layout).values + method.NumWords();
  }
  static std::unique_ptr<Encoder> MakeEncoder(const Setup& setup, const Source& source,
                                              Level level, void* words) {
    return std::make_unique<SelectingEncoder<M>>(setup, source, level, words);
  }
  static std::unique_ptr<Decoder> MakeDecoder(const Setup& setup, Level level) {
    return std::make_unique<SelectingDecoder<M>>(setup, level);
  }
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_SELECTOR_H_
