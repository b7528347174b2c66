// What goes wrong, as TensorFlow's status.
#ifndef TF_DGC_TENSORFLOW_GUARD_H_
#define TF_DGC_TENSORFLOW_GUARD_H_

#include <exception>
#include <new>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tf_dgc {

// Returns the status of `work()`, also where that throws: an exception that came as far as
// TensorFlow would end the process.
template <class Work>
absl::Status Guarded(Work work) {
  constexpr char kUnfinished[] =
      " in the middle of a step, which is lost: go on from the last checkpoint.";
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        absl::StrCat("tf_dgc's native operations ran out of memory", kUnfinished));
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat("tf_dgc's native operations failed (", error.what(),
                                            ")", kUnfinished));
  }
}

inline absl::Status WrongBuffer(const std::string& wrong) {
  return absl::InvalidArgumentError(
      absl::StrCat(wrong, ". All workers must run the same tf_dgc, model and settings."));
}

}  // namespace tf_dgc

#endif  // TF_DGC_TENSORFLOW_GUARD_H_
