#include "engine.h"

#include <cmath>

#include "places.h"
#include "wire.h"

namespace tf_dgc {
namespace {

using Encoders = std::vector<std::unique_ptr<Encoder>>;

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

}  // namespace

int64_t NumWords(const std::vector<Coded>& tensors, int round) {
  int64_t words = kHeaderWords;
  for (const Coded& tensor : tensors) {
    const Method* method = MethodOf(tensor, round);
    if (method != nullptr && VectorOf(tensor, round) < 0) words += method->num_words(tensor.setup);
  }
  return IsGathered(tensors, round) ? words : 0;
}

int64_t NumSummed(const std::vector<Coded>& tensors, int vector, int round) {
  int64_t numbers = 1;
  for (const Coded& tensor : tensors) {
    const Method* method = MethodOf(tensor, round);
    const bool is_there = method != nullptr && VectorOf(tensor, round) == vector;
    if (is_there) numbers += method->num_summed(tensor.setup);
  }
  return numbers;
}

Encoded Encode(const std::vector<Coded>& tensors, const std::vector<Source>& sources,
               uint32_t fingerprint, Level level, Threads& threads, uint32_t* words,
               const std::vector<Vector>& vectors, int round) {
  Encoders encoders;
  Encoded encoded{true, 0, {}};
  Places places(round, words, vectors);
  for (size_t t = 0; t < tensors.size(); ++t) {
    const Method* method = MethodOf(tensors[t], round);
    void* place = places.Next(tensors[t]);
    if (std::isnan(sources[t].scale)) encoded.all_taken = false;
    if (method == nullptr) continue;
    encoders.push_back(method->encoder(tensors[t].setup, sources[t], level, place));
  }
  const auto measures = [](const Encoder& e) { return e.measures(); };
  ForEachJobOf(encoders, threads, measures, [](Encoder& e, int64_t i) { e.Measure(i); });
  ForEachJob(threads, encoders.size(), [&](int64_t t) {
    if (encoders[t]->measures()) encoders[t]->Agree();
  });
  const auto all = [](const Encoder&) { return true; };
  ForEachJobOf(encoders, threads, all, [](Encoder& e, int64_t i) { e.Encode(i); });
  ForEachJob(threads, encoders.size(), [&](int64_t t) { encoders[t]->Finish(threads); });
  for (const auto& encoder : encoders) {
    if (encoder->left_out()) encoded.all_taken = false;
    encoded.entries += encoder->num_sent();
    for (const float note : encoder->notes()) encoded.notes.push_back(note);
  }
  const auto joins = [](const Encoder& e) { return e.joins(); };
  ForEachJobOf(encoders, threads, joins, [](Encoder& e, int64_t i) { e.Join(i); });
  if (IsGathered(tensors, round)) {
    WriteHeader(fingerprint, encoded.all_taken, words, NumWords(tensors, round));
  }
  return encoded;
}

}  // namespace tf_dgc
