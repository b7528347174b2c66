#include "one_bit.h"

#include "quantizer.h"

namespace tf_dgc {
namespace {

const RegisteredQuantizer<OneBit> registered("one_bit");

}  // namespace
}  // namespace tf_dgc
