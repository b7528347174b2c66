#include "halves.h"

#include "quantizer.h"

namespace tf_dgc {
namespace {

const RegisteredQuantizer<Rounded<Float16>> float16("float16");
const RegisteredQuantizer<Rounded<BFloat16>> bfloat16("bfloat16");

}  // namespace
}  // namespace tf_dgc
