// A program in C++ against afflux.h: a FedBuff step of two updates.
#include <afflux.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  std::vector<float> params(6, 1.0F), first(6, 2.0F), second(6, 4.0F);
  const auto view = [](std::vector<float>& of) {
    return afflux_view{of.data(), static_cast<std::int64_t>(of.size()), {AFFLUX_CPU, 0}, AFFLUX_FLOAT32, nullptr};
  };
  const std::array<afflux_view, 2> updates{view(first), view(second)};
  const std::array<double, 2> weights{0.5, 0.5};
  afflux_pass pass;
  afflux_pass_init(&pass);
  pass.params = pass.out = view(params);
  pass.combine.updates = {updates.data(), 2};
  pass.combine.weights = {weights.data(), 2};
  int valid = 0;
  if (afflux_apply(&pass, 1, 0, &valid) != AFFLUX_OK) {
    std::puts(afflux_last_error());
    return 1;
  }
  std::printf("%d %g\n", valid, params[5]);
}
