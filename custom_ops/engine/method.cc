#include "method.h"

#include <map>

namespace tf_dgc {
namespace {

std::map<std::string, Method>& Known() {
  static auto* known = new std::map<std::string, Method>();
  return *known;
}

}  // namespace

Registered::Registered(const char* name, const Method& method) { Known()[name] = method; }

const Method* FindMethod(const std::string& name) {
  const auto found = Known().find(name);
  return found == Known().end() ? nullptr : &found->second;
}

}  // namespace tf_dgc
