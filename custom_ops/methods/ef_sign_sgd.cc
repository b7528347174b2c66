#include "ef_sign_sgd.h"

#include "quantizer.h"

namespace tf_dgc {
namespace {

const RegisteredQuantizer<EFSignSGD> registered("ef_sign_sgd");

}  // namespace
}  // namespace tf_dgc
