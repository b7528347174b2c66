// A few levels of each bucket's norm, by chance (tf_dgc/compressors/qsgd.py).
#include "levels.h"
#include "quantizer.h"

namespace tf_dgc {
namespace {

const RegisteredQuantizer<Levels<Planes>> fixed("qsgd, fixed");
const RegisteredQuantizer<Levels<Elias>> elias("qsgd, elias");

}  // namespace
}  // namespace tf_dgc
