#include <algorithm>
#include <atomic>
#include <limits>

#include "engine.h"
#include "measures.h"
#include "places.h"
#include "wire.h"

namespace tf_dgc {
namespace {

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

std::string Buffers::Open(const std::vector<Coded>& tensors, const std::vector<Gathered>& rounds,
                          const std::vector<Vector>& vectors, Level level, Threads& threads) {
  for (const Coded& tensor : tensors) {
    sizes_.push_back(tensor.setup.size);
    decoders_.push_back(tensor.method->decoder(tensor.setup, level));
  }
  words_.resize(tensors.size());
  for (size_t round = 0; round < rounds.size(); ++round) {
    const Gathered& gathered = rounds[round];
    if (IsGathered(tensors, round)) {
      const std::string wrong = ReadHeaders(gathered, NumWords(tensors, round), threads);
      if (!wrong.empty()) return wrong;
    }
    Places places(round, gathered.words, vectors);
    for (size_t t = 0; t < tensors.size(); ++t) {
      const void* first = places.Next(tensors[t]);
      if (MethodOf(tensors[t], round) != tensors[t].method) continue;
      const int64_t payloads = tensors[t].vector < 0 ? gathered.num_workers : 1;
      for (int64_t w = 0; w < payloads; ++w) {
        words_[t].push_back(static_cast<const uint32_t*>(first) + w * gathered.num_words);
      }
      decoders_[t]->Expect(payloads);
    }
  }
  return OpenWords(threads);
}

std::string Buffers::ReadHeaders(const Gathered& gathered, int64_t expected, Threads& threads) {
  std::vector<std::string> errors(gathered.num_workers);
  std::vector<char> finite(gathered.num_workers);
  ForEachJob(threads, gathered.num_workers, [&](int64_t w) {
    bool is_finite = true;
    errors[w] = ReadHeader(gathered.words + w * gathered.num_words, gathered.num_words, expected,
                           gathered.fingerprint, &is_finite);
    finite[w] = is_finite;
  });
  num_nonfinite_ = std::count(finite.begin(), finite.end(), false);
  for (int64_t w = 0; w < gathered.num_workers; ++w) {
    if (!errors[w].empty()) {
      return "The buffer of worker " + std::to_string(w) + " " + errors[w];
    }
  }
  return "";
}

std::string Buffers::OpenWords(Threads& threads) {
  std::vector<Job> jobs;
  for (size_t t = 0; t < words_.size(); ++t) {
    for (size_t w = 0; w < words_[t].size(); ++w) jobs.push_back({t, static_cast<int64_t>(w)});
  }
  std::vector<std::string> errors(jobs.size());
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

std::vector<float> Buffers::Norms(const std::vector<const Method*>& methods) const {
  std::vector<float> norms;
  for (size_t t = 0; t < methods.size(); ++t) {
    if (methods[t]->notes_total) norms.push_back(decoders_[t]->norm());
  }
  return norms;
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
