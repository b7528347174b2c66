#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

constexpr size_t kCapacity = size_t{8} << 30;  // pages that are not touched take no memory
constexpr size_t kAlignment = 64;

class Memory {
 public:
  static Memory& Get() {
    static Memory* memory = new Memory;  // never destroyed: threads may outlive `main`
    return *memory;
  }

  void* Allocate(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (limit_ > 0 && bytes > limit_) return nullptr;
    const size_t asked = bytes;
    bytes = Rounded(bytes);
    for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
      const auto [start, size] = *gap;
      if (size < bytes) continue;
      gaps_.erase(gap);
      if (size > bytes) gaps_[start + bytes] = size - bytes;
      used_[start] = asked;
      std::memset(open_ + start, 0xa5, bytes);
      return closed_ + start;
    }
    return nullptr;
  }

  void Free(void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(static_cast<char*>(address) - closed_);
    if (found == used_.end()) Stop("Free", address, 0);
    const size_t start = found->first;
    size_t size = Rounded(found->second);
    used_.erase(found);
    std::memset(open_ + start, 0x5a, size);
    auto next = gaps_.lower_bound(start);
    if (next != gaps_.end() && next->first == start + size) {
      size += next->second;
      next = gaps_.erase(next);
    }
    if (next != gaps_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == start) {
        before->second += size;
        return;
      }
    }
    gaps_[start] = size;
  }

  void Limit(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    limit_ = bytes;
  }

  bool Has(const void* address) const {
    const char* place = static_cast<const char*>(address);
    return place >= closed_ && place < closed_ + kCapacity;
  }

  void* Open(const void* address, size_t bytes, const char* what) {
    if (bytes == 0) return nullptr;
    if (!Has(address)) Stop(what, address, bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t start = static_cast<const char*>(address) - closed_;
    auto found = used_.upper_bound(start);
    if (found == used_.begin()) Stop(what, address, bytes);
    --found;
    if (start + bytes > found->first + found->second) Stop(what, address, bytes);
    return open_ + start;
  }

 private:
  Memory() {
    const int file = memfd_create("tf_dgc_test_device", 0);
    if (file < 0 || ftruncate(file, kCapacity) != 0) Stop("memfd_create", nullptr, kCapacity);
    closed_ = Map(file, PROT_NONE);
    open_ = Map(file, PROT_READ | PROT_WRITE);
    close(file);
    gaps_[0] = kCapacity;
  }

  static size_t Rounded(size_t bytes) {
    return std::max((bytes + kAlignment - 1) / kAlignment, size_t{1}) * kAlignment;
  }

  static char* Map(int file, int protection) {
    void* view = mmap(nullptr, kCapacity, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (view == MAP_FAILED) Stop("mmap", nullptr, kCapacity);
    return static_cast<char*>(view);
  }

  [[noreturn]] static void Stop(const char* what, const void* address, size_t bytes) {
    std::fprintf(stderr, "The test device: %s: %zu bytes at %p are not one allocation.\n", what,
                 bytes, address);
    std::abort();
  }

  char* closed_;
  char* open_;
  size_t limit_ = 0;
  std::mutex mutex_;
  std::map<size_t, size_t> gaps_, used_;  // sizes by offset; of used ones as asked for
};

}  // namespace

void* tf_dgc_test_device_allocate(size_t bytes) { return Memory::Get().Allocate(bytes); }
void tf_dgc_test_device_free(void* address) { Memory::Get().Free(address); }
void tf_dgc_test_device_limit(size_t bytes) { Memory::Get().Limit(bytes); }
bool tf_dgc_test_device_has(const void* address) { return Memory::Get().Has(address); }
void* tf_dgc_test_device_open(const void* address, size_t bytes, const char* what) {
  return Memory::Get().Open(address, bytes, what);
}
