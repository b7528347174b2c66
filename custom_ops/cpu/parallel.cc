#include "parallel.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "denormals.h"

namespace tf_dgc {
namespace {

// Shared with scheduled work that may start after everything is done.
struct Jobs {
  std::mutex mutex;
  std::condition_variable all_done;
  int64_t next = 0;
  int64_t running = 0;
  int64_t total = 0;
  const std::function<void(int64_t)>* job = nullptr;  // valid while next < total
  std::exception_ptr thrown;  // by the first job that failed

  void Work() {
    FlushDenormals flush;
    std::unique_lock<std::mutex> lock(mutex);
    while (next < total) {
      const int64_t mine = next++;
      ++running;
      lock.unlock();
      std::exception_ptr failure = Try(mine);
      lock.lock();
      --running;
      if (failure != nullptr && thrown == nullptr) {
        thrown = std::move(failure);
        next = total;
      }
    }
    if (running == 0) all_done.notify_all();
  }

 private:
  // An exception that left the function of a thread would end the process.
  std::exception_ptr Try(int64_t index) {
    try {
      (*job)(index);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
};

}  // namespace

void ForEachJob(Threads& threads, int64_t num_jobs, const std::function<void(int64_t)>& job) {
  auto jobs = std::make_shared<Jobs>();
  jobs->total = num_jobs;
  jobs->job = &job;
  const int64_t helpers = std::min<int64_t>(threads.count(), num_jobs) - 1;
  try {
    for (int64_t i = 0; i < helpers; ++i) threads.Schedule([jobs] { jobs->Work(); });
  } catch (...) {
    // With fewer helpers, or none. Those that were scheduled need the jobs as they are.
  }
  jobs->Work();
  std::unique_lock<std::mutex> lock(jobs->mutex);
  jobs->all_done.wait(lock, [&] { return jobs->running == 0; });
  if (jobs->thrown != nullptr) std::rethrow_exception(std::exchange(jobs->thrown, nullptr));
}

}  // namespace tf_dgc
