#include "natural.h"

#include "quantizer.h"

namespace tf_dgc {
namespace {

const RegisteredQuantizer<Natural> registered("natural");

}  // namespace
}  // namespace tf_dgc
