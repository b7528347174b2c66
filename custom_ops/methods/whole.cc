#include "whole.h"

#include "quantizer.h"

namespace tf_dgc {
namespace {

const RegisteredQuantizer<Exact> registered("whole");

}  // namespace
}  // namespace tf_dgc
