#include "uniform_8bit.h"

#include "quantizer.h"

namespace tf_dgc {
namespace {

const RegisteredQuantizer<Uniform8Bit> nearest("uniform_8bit");
const RegisteredQuantizer<Stochastic> stochastic("uniform_8bit, stochastic");

}  // namespace
}  // namespace tf_dgc
