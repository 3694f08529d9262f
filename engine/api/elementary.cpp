#include "formula/elementary.hpp"

#include "afflux/afflux.hpp"
#include "cpu/parallel_for.hpp"

namespace afflux {
namespace {

template <class Function>
double computed(const Function& function) {
  double result = 0.0;
  strict_float_mode([&] { result = function(); });
  return result;
}

}  // namespace

void strict_float_mode(const std::function<void()>& body) {
  parallel_for(1, 1, [&](std::int64_t) { body(); });  // parallel_for sets the mode
}

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
