// Where TensorFlow hands work and memory from one thread to another. It is not compiled with
// the thread sanitizer, which therefore sees none of its locks and queues and would call all
// that they pass on a race. In other builds this does nothing.
#ifndef TF_DGC_TENSORFLOW_BORDER_H_
#define TF_DGC_TENSORFLOW_BORDER_H_

#ifdef __SANITIZE_THREAD__
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#endif

namespace tf_dgc {

#ifdef __SANITIZE_THREAD__
inline char border;
inline void TakeFromTensorFlow() { __tsan_acquire(&border); }
inline void GiveToTensorFlow() { __tsan_release(&border); }
#else
inline void TakeFromTensorFlow() {}
inline void GiveToTensorFlow() {}
#endif

// What TensorFlow calls takes at its beginning, and gives when it returns.
class Called {
 public:
  Called() { TakeFromTensorFlow(); }
  ~Called() { GiveToTensorFlow(); }
};

}  // namespace tf_dgc

#endif  // TF_DGC_TENSORFLOW_BORDER_H_
