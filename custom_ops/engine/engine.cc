#include "engine.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "measures.h"
#include "wire.h"

namespace tf_dgc {
namespace {

using Encoders = std::vector<std::unique_ptr<Encoder>>;

struct Job {
  size_t tensor;
  int64_t index;
};

// Calls work(encoder, i) with all jobs of those encoders that `wanted` says, on all threads.
template <class Wanted, class Work>
void ForEachJobOf(const Encoders& encoders, Threads& threads, Wanted wanted, Work work) {
  std::vector<Job> jobs;
  for (size_t t = 0; t < encoders.size(); ++t) {
    const int64_t count = wanted(*encoders[t]) ? encoders[t]->NumJobs() : 0;
    for (int64_t i = 0; i < count; ++i) jobs.push_back({t, i});
  }
  ForEachJob(threads, jobs.size(),
             [&](int64_t j) { work(*encoders[jobs[j].tensor], jobs[j].index); });
}

bool IsGathered(const std::vector<Coded>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const Coded& t) { return t.vector < 0; });
}

// Where tensors begin, one after the other: behind a header, or behind a flag.
class Places {
 public:
  Places(const uint32_t* words, const std::vector<Vector>& vectors)
      : words_(words == nullptr ? nullptr : const_cast<uint32_t*>(words) + kHeaderWords),
        vectors_(vectors) {
    for (Vector& vector : vectors_) vector.data += vector.itemsize;
  }

  void* Next(const Coded& tensor) {
    if (tensor.vector < 0) {
      words_ += tensor.method->num_words(tensor.setup);
      return words_ - tensor.method->num_words(tensor.setup);
    }
    Vector& vector = vectors_[tensor.vector];
    const int64_t bytes = tensor.method->num_summed(tensor.setup) * vector.itemsize;
    vector.data += bytes;
    return vector.data - bytes;
  }

 private:
  uint32_t* words_;
  std::vector<Vector> vectors_;
};

constexpr int64_t kJob = 1 << 16;  // entries, more or less

bool IsAllFinite(const float* values, int64_t n) {
  Largest largest{};
  largest.Add(values, n);
  return largest.bits < Magnitude<float>::kInfinity;
}

// Returns the largest magnitude.
float LargestOf(const float* values, int64_t n, Threads& threads) {
  std::vector<Largest> found((n + kJob - 1) / kJob);
  ForEachJob(threads, found.size(), [&](int64_t job) {
    found[job].Add(values + job * kJob, std::min(kJob, n - job * kJob));
  });
  Largest all{};
  for (const Largest& largest : found) all.Merge(largest);
  return all.value();
}

std::vector<char> Not(const std::vector<std::atomic<bool>>& flags) {
  std::vector<char> opposite;
  for (const auto& flag : flags) opposite.push_back(!flag);
  return opposite;
}

}  // namespace

int64_t NumWords(const std::vector<Coded>& tensors) {
  int64_t words = 0;
  for (const Coded& tensor : tensors) {
    if (tensor.vector < 0) words += tensor.method->num_words(tensor.setup);
  }
  return IsGathered(tensors) ? kHeaderWords + words : 0;
}

int64_t NumSummed(const std::vector<Coded>& tensors, int vector) {
  int64_t numbers = 1;
  for (const Coded& tensor : tensors) {
    if (tensor.vector == vector) numbers += tensor.method->num_summed(tensor.setup);
  }
  return numbers;
}

Encoded Encode(const std::vector<Coded>& tensors, const std::vector<Source>& sources,
               uint32_t fingerprint, Level level, Threads& threads, uint32_t* words,
               const std::vector<Vector>& vectors) {
  Encoders encoders;
  Places places(words, vectors);
  for (size_t t = 0; t < tensors.size(); ++t) {
    const Coded& tensor = tensors[t];
    encoders.push_back(
        tensor.method->encoder(tensor.setup, sources[t], level, places.Next(tensor)));
  }
  const auto measures = [](const Encoder& e) { return e.measures(); };
  ForEachJobOf(encoders, threads, measures, [](Encoder& e, int64_t i) { e.Measure(i); });
  ForEachJob(threads, encoders.size(), [&](int64_t t) {
    if (encoders[t]->measures()) encoders[t]->Agree();
  });
  const auto all = [](const Encoder&) { return true; };
  ForEachJobOf(encoders, threads, all, [](Encoder& e, int64_t i) { e.Encode(i); });
  ForEachJob(threads, encoders.size(), [&](int64_t t) { encoders[t]->Finish(threads); });
  Encoded encoded{true, 0};
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (encoders[t]->left_out() || std::isnan(sources[t].scale)) encoded.all_taken = false;
    encoded.entries += encoders[t]->num_sent();
  }
  const auto joins = [](const Encoder& e) { return e.joins(); };
  ForEachJobOf(encoders, threads, joins, [](Encoder& e, int64_t i) { e.Join(i); });
  if (IsGathered(tensors)) {
    WriteHeader(fingerprint, encoded.all_taken, words, NumWords(tensors));
  }
  return encoded;
}

std::string Buffers::Open(const std::vector<Coded>& tensors, const uint32_t* words,
                          int64_t num_workers, int64_t num_words,
                          const std::vector<Vector>& vectors, uint32_t fingerprint, Level level,
                          Threads& threads) {
  const int64_t expected = NumWords(tensors);
  if (!IsGathered(tensors)) num_workers = 0;
  std::vector<std::string> errors(num_workers);
  std::vector<char> finite(num_workers);
  ForEachJob(threads, num_workers, [&](int64_t w) {
    bool is_finite = true;
    errors[w] = ReadHeader(words + w * num_words, num_words, expected, fingerprint, &is_finite);
    finite[w] = is_finite;
  });
  for (int64_t w = 0; w < num_workers; ++w) {
    if (!errors[w].empty()) {
      return "The buffer of worker " + std::to_string(w) + " " + errors[w];
    }
    num_nonfinite_ += !finite[w];
  }
  Places places(words, vectors);
  for (const Coded& tensor : tensors) {
    sizes_.push_back(tensor.setup.size);
    decoders_.push_back(tensor.method->decoder(tensor.setup, level));
    const void* first = places.Next(tensor);
    words_.push_back({first});
    for (int64_t w = 1; tensor.vector < 0 && w < num_workers; ++w) {
      words_.back().push_back(static_cast<const uint32_t*>(first) + w * num_words);
    }
    decoders_.back()->Expect(words_.back().size());
  }
  std::vector<Job> jobs;
  for (size_t t = 0; t < words_.size(); ++t) {
    for (size_t w = 0; w < words_[t].size(); ++w) jobs.push_back({t, static_cast<int64_t>(w)});
  }
  errors.assign(jobs.size(), "");
  ForEachJob(threads, jobs.size(), [&](int64_t j) {
    const auto [t, w] = jobs[j];
    errors[j] = decoders_[t]->Open(w, words_[t][w]);
  });
  for (size_t j = 0; j < jobs.size(); ++j) {
    if (errors[j].empty()) continue;
    return "The buffer of worker " + std::to_string(jobs[j].index) + " is wrong in tensor " +
           std::to_string(jobs[j].tensor) + ": " + errors[j];
  }
  return "";
}

void Buffers::ForEachPart(Threads& threads, const Work& work) const {
  ForEachPartOf(std::vector<char>(sizes_.size(), true), true, threads, work);
}

void Buffers::ForEachPartOf(const std::vector<char>& wanted, bool keeps, Threads& threads,
                            const Work& work) const {
  std::vector<Job> jobs;
  std::vector<int64_t> lengths;
  for (size_t t = 0; t < sizes_.size(); ++t) {
    const int64_t part = decoders_[t]->part();
    lengths.push_back(std::max<int64_t>(1, kJob / part) * part);
    const int64_t end = wanted[t] ? sizes_[t] : 0;
    for (int64_t at = 0; at < end; at += lengths[t]) jobs.push_back({t, at});
  }
  ForEachJob(threads, jobs.size(), [&](int64_t j) {
    const auto [t, start] = jobs[j];
    const int64_t part = decoders_[t]->part();
    thread_local std::vector<float> sums;
    if (static_cast<int64_t>(sums.size()) < part) sums.resize(part);
    const int64_t end = std::min(sizes_[t], start + lengths[t]);
    for (int64_t at = start; at < end; at += part) {
      const int64_t stop = std::min(end, at + part);
      decoders_[t]->Sum(words_[t], at, stop, sums.data());
      if (Remembers(t)) decoders_[t]->Share(at, stop, shared_[t], keeps, sums.data());
      work(t, at, stop, sums.data());
    }
  });
}

std::vector<double> Buffers::Bounds(Threads& threads) const {
  std::vector<double> bounds(sizes_.size());
  ForEachJob(threads, sizes_.size(), [&](int64_t t) {
    for (const void* words : words_[t]) bounds[t] += decoders_[t]->Bound(words);
  });
  for (size_t t = 0; t < sizes_.size(); ++t) {
    if (Remembers(t)) bounds[t] += LargestOf(shared_[t][0], sizes_[t], threads);
  }
  return bounds;
}

std::vector<char> Buffers::AreFinite(Threads& threads) const {
  std::vector<char> in_doubt;
  for (const double bound : Bounds(threads)) {
    in_doubt.push_back(!(bound < std::numeric_limits<float>::max()));
  }
  std::vector<std::atomic<bool>> overflows(sizes_.size());
  ForEachPartOf(in_doubt, false, threads,
                [&](size_t t, int64_t begin, int64_t end, const float* part) {
                  if (!IsAllFinite(part, end - begin)) overflows[t] = true;
                });
  return Not(overflows);
}

std::vector<char> Buffers::Sum(const std::vector<float*>& sums, Threads& threads) const {
  const bool remembers = std::any_of(shared_.begin(), shared_.end(),
                                     [](const auto& arrays) { return !arrays.empty(); });
  // What moves on is not to be had back.
  const std::vector<char> finite =
      remembers ? AreFinite(threads) : std::vector<char>(sizes_.size(), true);
  const bool keeps = std::all_of(finite.begin(), finite.end(), [](char is) { return is; });
  std::vector<std::atomic<bool>> overflows(sizes_.size());
  const std::vector<char> all(sizes_.size(), true);
  ForEachPartOf(all, keeps, threads,
                [&](size_t t, int64_t begin, int64_t end, const float* part) {
                  std::copy(part, part + (end - begin), sums[t] + begin);
                  if (!IsAllFinite(part, end - begin)) overflows[t] = true;
                });
  return Not(overflows);
}

}  // namespace tf_dgc
