#include "two_bit.h"

#include "quantizer.h"

namespace tf_dgc {
namespace {

const RegisteredQuantizer<TwoBit> registered("two_bit");

}  // namespace
}  // namespace tf_dgc
