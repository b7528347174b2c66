// A native method as the operations see it: tensors in, words out, and back.
#ifndef TF_DGC_ENGINE_METHOD_H_
#define TF_DGC_ENGINE_METHOD_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "loops.h"
#include "parallel.h"
#include "philox.h"
#include "source.h"

namespace tf_dgc {

// What a method is told of a tensor, the same on all workers but for `draw`.
struct Setup {
  int64_t size;     // number of entries
  int64_t columns;  // length of the last axis; 1 for ranks below 2
  std::vector<float> parameters;  // in the order in which the method's Python states them
  Draw draw;
  std::vector<float> numbers = {};  // what workers agreed upon in a round before

  // Returns a whole number of 16 bits and more, as two parameters of 24 bits say it.
  int64_t Count(int at) const {
    return static_cast<int64_t>(parameters[at]) * (1 << 16) +
           static_cast<int64_t>(parameters[at + 1]);
  }
};

// A tensor of this worker on its way into words. `Measure`, of all jobs, then `Agree`, then
// `Encode`, of all jobs, then `Finish`, then `Join`, of all jobs; jobs may run at once, and in any order.
class Encoder {
 public:
  virtual ~Encoder() = default;
  virtual int64_t NumJobs() const = 0;
  // Whether it looks at the whole tensor before it sends any of it.
  virtual bool measures() const { return false; }
  virtual void Measure(int64_t) {}
  virtual void Agree() {}
  virtual void Encode(int64_t job) = 0;
  virtual void Finish(Threads&) {}
  // Whether where a job's codes go depends on those of other jobs.
  virtual bool joins() const { return false; }
  virtual void Join(int64_t) {}
  // Whether an entry's gradient was left out, as it would have overflowed.
  virtual bool left_out() const { return false; }
  // Entries that were sent.
  virtual int64_t num_sent() const = 0;
  virtual std::vector<float> notes() const { return {}; }
};

// The words of all workers on their way into sums.
class Decoder {
 public:
  virtual ~Decoder() = default;
  // Entries from which a part may begin are multiples of this.
  virtual int64_t part() const = 0;
  // Says how many workers there are; then come the words of each, of some at once.
  // Returns what is wrong with them, or "".
  virtual void Expect(int64_t num_workers) = 0;
  virtual std::string Open(int64_t worker, const void* words) = 0;
  // Returns a bound of what a worker's words stand for, of any entry; infinity for none.
  virtual double Bound(const void* worker) const = 0;
  // Writes the sum over workers, one after the other, of entries [begin, end), which are a
  // part, to `sums`.
  virtual void Sum(const std::vector<const void*>& workers, int64_t begin, int64_t end,
                   float* sums) const = 0;
  // Makes of these sums what is handed out, by arrays that all workers remember alike; moves
  // them on, too, if `keeps`.
  virtual void Share(int64_t, int64_t, const std::vector<float*>&, bool, float*) const {}
  // The norm of what was handed out.
  virtual float norm() const { return 0; }
};

struct Method {
  // Words that are gathered, or numbers that are summed on the way.
  int64_t (*num_words)(const Setup& setup);
  int64_t (*num_summed)(const Setup& setup);
  // `words` is where they go: of what is summed on the way, numbers of the type that it
  // travels in.
  std::unique_ptr<Encoder> (*encoder)(const Setup& setup, const Source& source, Level level,
                                      void* words);
  std::unique_ptr<Decoder> (*decoder)(const Setup& setup, Level level);
  int num_states = 0;  // arrays of the tensor's size that this worker remembers
  int num_shared = 0;  // those that all workers remember alike, as decoders see to
  int notes_total = 0;  // 1 if a decoder leaves the norm of what it hands out
};

// Returns null if there is none of that name.
const Method* FindMethod(const std::string& name);

// Makes a method known by its name, while the library is loaded.
struct Registered {
  Registered(const char* name, const Method& method);
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_METHOD_H_
