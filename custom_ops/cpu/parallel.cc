#include "parallel.h"

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tf_dgc {
namespace {

// Sets flush-to-zero and denormals-are-zero, and restores what was set.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

// Shared with scheduled work that may start after everything is done.
struct Jobs {
  std::mutex mutex;
  std::condition_variable all_done;
  int64_t next = 0;
  int64_t running = 0;
  int64_t total = 0;
  const std::function<void(int64_t)>* job = nullptr;  // valid while next < total

  void Work() {
    FlushDenormals flush;
    std::unique_lock<std::mutex> lock(mutex);
    while (next < total) {
      const int64_t mine = next++;
      ++running;
      lock.unlock();
      (*job)(mine);
      lock.lock();
      --running;
    }
    if (running == 0) all_done.notify_all();
  }
};

}  // namespace

void ForEachJob(Threads& threads, int64_t num_jobs, const std::function<void(int64_t)>& job) {
  auto jobs = std::make_shared<Jobs>();
  jobs->total = num_jobs;
  jobs->job = &job;
  const int64_t helpers = std::min<int64_t>(threads.count(), num_jobs) - 1;
  for (int64_t i = 0; i < helpers; ++i) threads.Schedule([jobs] { jobs->Work(); });
  jobs->Work();
  std::unique_lock<std::mutex> lock(jobs->mutex);
  jobs->all_done.wait(lock, [&] { return jobs->running == 0; });
}

}  // namespace tf_dgc
