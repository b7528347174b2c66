// Methods that send the largest entries of each chunk: positions by their gaps, then values. A
// method states `Chunks chunks`, `Gaps gaps`, a `decay` of the residual, the `largest` that may
// be sent, where ties are broken from, `tie`, and how values travel, `values`.
#ifndef TF_DGC_ENGINE_CHUNK_CODER_H_
#define TF_DGC_ENGINE_CHUNK_CODER_H_

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "chunks.h"
#include "cut.h"
#include "gaps.h"
#include "selecting_decoder.h"
#include "selection.h"

namespace tf_dgc {

template <class M>
class ChunkEncoder : public Encoder {
 public:
  ChunkEncoder(const Setup& setup, const Source& source, Level level, void* words)
      : method_(setup),
        source_(source),
        level_(level),
        words_(static_cast<uint32_t*>(words)),
        per_job_(std::max<int64_t>(1, kPart / method_.chunks.length)),
        chosen_{std::vector<int32_t>(method_.chunks.Sent()), method_.chunks.Sent()},
        values_(method_.chunks.Sent()),
        means_(method_.chunks.count),
        left_out_(NumJobs()) {}

  int64_t NumJobs() const override { return (method_.chunks.count + per_job_ - 1) / per_job_; }

  void Encode(int64_t job) override {
    const int64_t end = std::min(method_.chunks.count, (job + 1) * per_job_);
    for (int64_t i = job * per_job_; i < end; ++i) left_out_[job] |= Choose(i);
  }

  void Finish(Threads& threads) override {
    const auto& positions = chosen_.positions;
    num_sent_ = method_.gaps.Encode(positions.data(), words_);
    const Turned turned = method_.gaps.Turn(positions.data());
    method_.values.Write(method_.chunks, turned, means_, values_.data(),
                         words_ + method_.gaps.Words());
    const bool masks = source_.factor_masking && source_.rule != Rule::kNone &&
                       num_sent_ < source_.size;
    if (source_.residual == nullptr && !masks) return;
    ForEachChosen(chosen_, source_, threads, [&](int64_t i, int64_t at) {
      if (turned.Of(i) >= num_sent_) return;  // there was no room for it
      if (source_.residual != nullptr) source_.residual[at] -= values_[i];
      if (masks) source_.velocity[at] = 0;
    });
  }

  bool left_out() const override {
    return std::any_of(left_out_.begin(), left_out_.end(), [](char left) { return left; });
  }
  int64_t num_sent() const override { return num_sent_; }

 private:
  // Accumulates a chunk; returns whether an entry's gradient was left out.
  bool Choose(int64_t chunk) {
    const float bound = std::min(method_.largest, std::numeric_limits<float>::max() / 4);
    thread_local std::vector<float> scratch;
    const int64_t begin = chunk * method_.chunks.length, n = method_.chunks.LengthOf(chunk);
    if (static_cast<int64_t>(scratch.size()) < n) scratch.resize(n);
    float* values = source_.residual == nullptr ? scratch.data() : source_.residual + begin;
    const bool left = LoadDecayed(source_, begin, begin + n, method_.decay, level_, values);
    for (int64_t i = 0; i < n; ++i) scratch[i] = AtMost(values[i], bound);
    const int64_t k = method_.chunks.SentOf(chunk), first = method_.chunks.SentBefore(chunk);
    int32_t* positions = chosen_.positions.data() + first;
    LargestOf(scratch.data(), n, k, static_cast<int64_t>(method_.tie * n), level_, begin,
              positions);
    double sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      values_[first + i] = scratch[positions[i] - begin];
      sum += std::abs(static_cast<double>(values_[first + i]));
    }
    means_[chunk] = sum / k;
    return left;
  }

  const M method_;
  const Source source_;
  const Level level_;
  uint32_t* const words_;
  const int64_t per_job_;  // chunks
  Selection chosen_;
  std::vector<float> values_;
  std::vector<double> means_;  // magnitudes of what is sent of each chunk
  std::vector<char> left_out_;
  int64_t num_sent_ = 0;
};

// Decodes a worker's words, all of which mean something.
template <class M>
std::string ReadChunks(const M& method, const uint32_t* words, Entries<float>* entries) {
  entries->positions.Allocate(method.chunks.Sent());
  const Turned turned = method.gaps.Decode(words, entries->positions.data());
  entries->positions.Keep(turned.count);
  entries->values.Allocate(turned.count);
  method.values.Read(method.chunks, turned, words + method.gaps.Words(),
                     entries->positions.data(), entries->values.data());
  return "";
}

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_CHUNK_CODER_H_
