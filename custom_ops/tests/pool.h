// Threads for C++ programs without TensorFlow.
#ifndef TF_DGC_TESTS_POOL_H_
#define TF_DGC_TESTS_POOL_H_

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "parallel.h"

namespace tf_dgc {

class Pool : public Threads {
 public:
  explicit Pool(int count) {
    for (int i = 1; i < count; ++i) threads_.emplace_back([this] { Work(); });
  }

  ~Pool() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stops_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int count() const override { return threads_.size() + 1; }

  void Schedule(std::function<void()> work) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_one();
  }

 private:
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stops_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool stops_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_POOL_H_
