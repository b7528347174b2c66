// Jobs over the threads of somebody else's pool.
#ifndef TF_DGC_CPU_PARALLEL_H_
#define TF_DGC_CPU_PARALLEL_H_

#include <cstdint>
#include <functional>

namespace tf_dgc {

// The threads that may help. The library owns none.
class Threads {
 public:
  virtual ~Threads() = default;

  // How many may work at once, the caller included.
  virtual int count() const = 0;

  // Runs `work` on another thread, at some time, or never.
  virtual void Schedule(std::function<void()> work) = 0;
};

// Calls job(0) ... job(num_jobs - 1), each once, and returns when all have returned.
// The caller works too, so a pool whose threads are all busy delays nothing.
// Arithmetic within a job flushes denormals to zero: a decaying velocity would otherwise
// slow down a hundredfold, and threads that differ in that mode would differ in results.
//
// If a job throws, no further ones are begun; when those that are running have returned, the
// first exception is thrown here, on the caller's thread.
void ForEachJob(Threads& threads, int64_t num_jobs, const std::function<void(int64_t)>& job);

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_PARALLEL_H_
