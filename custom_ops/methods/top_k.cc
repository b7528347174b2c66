// The k entries of largest magnitude (tf_dgc/compressors/topk.py), also as signs of their
// mean magnitude (stc.py).
#include "selector.h"

namespace tf_dgc {
namespace {

struct TopK : Selector {
  explicit TopK(const Setup& setup)
      : Selector(setup, 0, false, static_cast<ValueType>(setup.parameters[2])) {}
};

const RegisteredSelector<TopK> registered("top_k");

}  // namespace
}  // namespace tf_dgc
