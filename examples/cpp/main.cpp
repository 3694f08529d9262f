// A FedBuff server in C++, without Python: ten updates are taken in, then applied in one sweep.
//
//   cmake -S . -B build && cmake --build build && cmake --install build --prefix build/prefix     (in the root)
//   cmake -S examples/cpp -B build/example -DCMAKE_PREFIX_PATH=$PWD/build/prefix && cmake --build build/example
//   build/example/example
#include <afflux/afflux.hpp>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr std::int64_t kSize = 100000;
constexpr int kBuffer = 10, kRounds = 50, kThreads = 2;

template <class T>
afflux::View<T> view(std::vector<std::remove_const_t<T>>& values) {
  return {values.data(), static_cast<std::int64_t>(values.size()), {}};
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum / static_cast<double>(a.size());
}

}  // namespace

int main() {
  std::mt19937 generator(0);
  std::normal_distribution<float> normal;
  std::vector<float> params(kSize), next(kSize), optimum(kSize), trained(kSize);
  for (float& value : optimum) value = normal(generator);
  std::vector<std::vector<float>> buffer(kBuffer, std::vector<float>(kSize));

  for (int round = 0; round < kRounds; ++round) {
    std::vector<afflux::View<const void>> updates;
    for (std::vector<float>& slot : buffer) {
      for (std::int64_t i = 0; i < kSize; ++i) trained[i] = 0.1f * (optimum[i] - params[i]) + 0.01f * normal(generator);
      // Copies the update and finds its norm, and the first element that is not finite, in one sweep.
      const afflux::Statistics facts = afflux::ingest(view<const float>(trained), view<float>(slot));
      if (facts.first_nonfinite == -1) updates.push_back(view<const float>(slot));
    }
    const std::vector<double> weights(updates.size(), 1.0 / static_cast<double>(updates.size()));
    afflux::Pass pass;  // out = params + lr * sum_i w_i u_i
    pass.params = view<const float>(params);
    pass.out = view<float>(next);
    pass.combine.updates = {updates.data(), static_cast<std::int64_t>(updates.size())};
    pass.combine.weights = {weights.data(), static_cast<std::int64_t>(weights.size())};
    pass.step.lr = 1.0;
    afflux::apply(pass, kThreads);
    params.swap(next);
  }
  std::printf("%d rounds, mean squared distance from the optimum %.5f\n", kRounds, distance(params, optimum));
  return 0;
}
