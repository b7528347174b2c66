// All tensors of a step by their native methods: gradients in, one buffer out; the buffers of
// all workers in, sums out.
#ifndef TF_DGC_ENGINE_ENGINE_H_
#define TF_DGC_ENGINE_ENGINE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "method.h"
#include "parallel.h"

namespace tf_dgc {

// A tensor of a step, as all workers know it.
struct Coded {
  const Method* method;
  Setup setup;
  // Which vector it travels in, to be summed on the way; -1 for the buffer, to be gathered.
  int vector = -1;
  // What it sends, of itself, in a round before that of `method`, and in which vector; null
  // for one round alone.
  const Method* first = nullptr;
  int first_vector = -1;
};

// What a worker hands over: a buffer of words behind a header, of tensors that are gathered,
// and vectors of numbers behind a flag, of those that are summed.
struct Vector {
  char* data;        // the first number is the flag
  int64_t itemsize;  // bytes of a number
};

// The buffers of all workers of a round: `num_workers` of `num_words` each, one after the
// other in memory.
struct Gathered {
  const uint32_t* words;
  int64_t num_workers, num_words;
  uint32_t fingerprint;
};

// What became of the gradients of a step.
struct Encoded {
  bool all_taken;
  int64_t entries;  // that were sent
  std::vector<float> notes;  // of all methods that leave some, one after the other
};

// Words of a worker's buffer of a round, header included; 0 if no tensor is gathered.
int64_t NumWords(const std::vector<Coded>& tensors, int round = 0);
// Numbers of a vector in a round, the flag included.
int64_t NumSummed(const std::vector<Coded>& tensors, int vector, int round = 0);

// Codes what this worker sends of each tensor in a round into `words`, NumWords() of them, and
// into the vectors, and updates what it remembers. The buffer's flag says whether all gradients were
// taken, and whoever owns the vectors sets theirs.
Encoded Encode(const std::vector<Coded>& tensors, const std::vector<Source>& sources,
               uint32_t fingerprint, Level level, Threads& threads, uint32_t* words,
               const std::vector<Vector>& vectors, int round = 0);

// Arrays that all workers remember alike, of each tensor; they have to stay where they are.
using Shared = std::vector<std::vector<float*>>;

// The buffers of all workers, and the sums of their vectors.
class Buffers {
 public:
  // Takes those of all rounds. Returns what is wrong with the first bad one, or "".
  std::string Open(const std::vector<Coded>& tensors, const std::vector<Gathered>& rounds,
                   const std::vector<Vector>& vectors, Level level, Threads& threads);

  // Says where that is which all workers remember.
  void Remember(const Shared& shared) { shared_ = shared; }

  // Workers whose gradient was not finite; 0 if no tensor is gathered.
  int32_t num_nonfinite() const { return num_nonfinite_; }
  // The norms of the sums of those methods that note them, when all parts were handed out.
  std::vector<float> Norms(const std::vector<const Method*>& methods) const;

  // Calls work(tensor, begin, end, sums) with the sums over workers, in their order, of all
  // parts of all tensors, on all threads; sums[0] is of entry `begin`. What all workers
  // remember moves on.
  using Work = std::function<void(size_t, int64_t, int64_t, const float*)>;
  void ForEachPart(Threads& threads, const Work& work) const;

  // Writes the sums of each tensor; returns of which they are finite. If all are, what all
  // workers remember moves on.
  std::vector<char> Sum(const std::vector<float*>& sums, Threads& threads) const;

  // Returns of which tensors the sums are finite. Where the numbers that travelled leave no
  // doubt, nothing is decoded for it.
  std::vector<char> AreFinite(Threads& threads) const;

 private:
  std::string ReadHeaders(const Gathered& gathered, int64_t expected, Threads& threads);
  std::string OpenWords(Threads& threads);

  std::vector<int64_t> sizes_;
  std::vector<std::unique_ptr<Decoder>> decoders_;
  std::vector<std::vector<const void*>> words_;  // [tensor][worker]
  Shared shared_;
  bool Remembers(size_t tensor) const { return !shared_.empty() && !shared_[tensor].empty(); }
  // Calls work(part) with all parts of those tensors that are wanted.
  void ForEachPartOf(const std::vector<char>& wanted, bool keeps, Threads& threads,
                     const Work& work) const;
  // Bounds of the sums of each tensor.
  std::vector<double> Bounds(Threads& threads) const;

  int32_t num_nonfinite_ = 0;
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_ENGINE_H_
