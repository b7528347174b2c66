// The processor's mode in which denormals are zero.
#ifndef TF_DGC_CPU_DENORMALS_H_
#define TF_DGC_CPU_DENORMALS_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tf_dgc {

// Denormals are zero on this thread, as operands and as results, until this is destroyed.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : before_(_mm_getcsr()) { Set(before_ | 0x8040); }  // FTZ and DAZ
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    Set(before_ | 1 << 24);  // FZ
  }
#else
#error "How does this processor flush denormals to zero?"
#endif
  ~FlushDenormals() { Set(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__x86_64__)
  static void Set(uint32_t mode) { _mm_setcsr(mode); }
  uint32_t before_;
#else
  static void Set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
  uint64_t before_;
#endif
};

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_DENORMALS_H_
