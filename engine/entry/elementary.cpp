#include "formula/elementary.hpp"

#include "afflux/afflux.hpp"
#include "cpu/parallel_for.hpp"

namespace afflux {
namespace {

// In the engine's floating-point mode, whatever the caller's: that is parallel_for's business.
template <class Function>
double computed(const Function& function) {
  double result = 0.0;
  parallel_for(1, 1, [&](std::int64_t) { result = function(); });
  return result;
}

}  // namespace

double exp(double x) {
  return computed([=] { return formula::exp(x); });
}

double log(double x) {
  return computed([=] { return formula::log(x); });
}

double pow(double x, double y) {
  return computed([=] { return formula::pow(x, y); });
}

}  // namespace afflux
