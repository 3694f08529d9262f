// A server in C++ that knows nothing of Python: one CA2FL round and one FedBuff round through the installed engine.
// Prints the resulting params as hexadecimal bits; tests/engine/test_native.py compares them with the Python package's.
#include <afflux/afflux.hpp>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

constexpr std::int64_t kSize = 70001;

std::vector<float> vector(int seed) {
  std::vector<float> values(kSize);
  std::uint32_t state = static_cast<std::uint32_t>(seed);
  for (float& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<std::int32_t>(state)) * (1.0f / 1073741824.0f);
  }
  return values;
}

template <class T>
afflux::View<T> view(std::vector<std::remove_const_t<T>>& values) {
  return {values.data(), static_cast<std::int64_t>(values.size()), {}};
}

std::uint32_t checksum(const std::vector<float>& values) {
  std::uint32_t sum = 0;
  for (const float value : values) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    sum = sum * 31u + bits;
  }
  return sum;
}

}  // namespace

int main() {
  std::vector<float> params = vector(1), next(kSize), first = vector(2), second = vector(3), slot(kSize);
  const afflux::Statistics facts = afflux::ingest(view<const float>(first), view<float>(slot));
  if (facts.first_nonfinite != -1) return 1;

  // The same update in two parts, the second as float64.
  const std::vector<double> tail(first.begin() + 30000, first.end());
  const std::vector<afflux::View<const void>> parts{afflux::View<const float>{first.data(), 30000, {}},
                                                    afflux::View<const double>{tail.data(), kSize - 30000, {}}};
  std::vector<afflux::Bfloat16> half(kSize);
  const std::int64_t count = static_cast<std::int64_t>(parts.size());
  const afflux::Statistics again = afflux::ingest({parts.data(), count}, view<float>(slot));
  const afflux::Statistics rounded = afflux::ingest({parts.data(), count}, view<afflux::Bfloat16>(half));
  std::printf("parts %d %a\n", again.sum_of_squares == facts.sum_of_squares, rounded.sum_of_squares);

  const std::vector<afflux::View<const void>> updates{view<const float>(slot), view<const float>(second)};
  const std::vector<double> weights{0.5, 0.5};
  afflux::Pass pass;
  pass.params = view<const float>(params);
  pass.out = view<float>(next);
  pass.combine.updates = {updates.data(), 2};
  pass.combine.weights = {weights.data(), 2};
  pass.step.lr = 0.7;
  afflux::apply(pass, 2);
  std::printf("fedbuff %08x\n", checksum(next));

  // The same round on vectors in parts, in place in the copy of params.
  const std::vector<std::int64_t> borders{0, 1000, 1000, 30000, kSize};
  const auto cut = [&borders](std::vector<float>& values) {
    std::vector<afflux::PartView> parts;
    for (std::size_t i = 0; i + 1 < borders.size(); ++i)
      parts.push_back({values.data() + borders[i], borders[i + 1] - borders[i]});
    return parts;
  };
  std::vector<float> own = params;
  const std::vector<afflux::PartView> own_parts = cut(own), slot_parts = cut(slot), second_parts = cut(second);
  const afflux::Parts cut_params{{borders.data(), 5}, {own_parts.data(), 4}},
      cut_updates[] = {{{borders.data(), 5}, {slot_parts.data(), 4}}, {{borders.data(), 5}, {second_parts.data(), 4}}};
  const afflux::View<const void> in_parts[] = {{cut_updates[0], kSize, afflux::Type::float32},
                                               {cut_updates[1], kSize, afflux::Type::float32}};
  afflux::Pass pass_of_parts = pass;
  pass_of_parts.params = {cut_params, kSize, afflux::Type::float32};
  pass_of_parts.out = {cut_params, kSize, afflux::Type::float32};
  pass_of_parts.combine.updates = {in_parts, 2};
  afflux::apply(pass_of_parts, 2);
  std::printf("fedbuff_of_parts %08x\n", checksum(own));

  std::vector<double> sum(kSize, 0.125);
  std::vector<unsigned char> row(static_cast<std::size_t>(afflux::row_bytes(afflux::Codec{}, kSize)));
  const std::vector<afflux::View<const unsigned char>> rows(2);
  const std::vector<afflux::View<unsigned char>> new_rows{view<unsigned char>(row), {}};
  pass.calibrate.kind = afflux::Calibration::cached_difference;
  pass.calibrate.sum = view<double>(sum);
  pass.calibrate.num_clients = 10;
  pass.calibrate.rows = {rows.data(), 2};
  pass.calibrate.new_rows = {new_rows.data(), 2};
  afflux::apply(pass, 3);
  std::printf("ca2fl %08x\n", checksum(next));

  double products[4];
  afflux::gram(pass.combine.updates, {products, 4, {}}, 2);
  std::printf("gram %a %a\n", products[0], products[1]);

  std::printf("elementary %a %a %a\n", afflux::exp(0.1), afflux::log(0.1), afflux::pow(0.1, 0.3));

  std::vector<float> memory = vector(4), m(kSize), v(kSize, 0.25f);
  const std::vector<afflux::View<void>> memories{view<float>(memory)}, states{view<float>(m), view<float>(v)};
  const std::vector<double> memory_weights{0.5}, next_memory{0.5, 0.0, 0.25};
  pass.calibrate.kind = afflux::Calibration::cached_mean;
  pass.rule_vectors = {{memories.data(), 1}, {memory_weights.data(), 1}, {next_memory.data(), 3}};
  pass.step = {afflux::StepKind::yogi, 0.7, 0.9, 0.99, 1e-3, 1.0, {states.data(), 2}};
  afflux::apply(pass, 2);
  std::printf("yogi %08x %08x\n", checksum(next), checksum(memory));

  pass.combine.weights.size = 1;
  try {
    afflux::apply(pass);
  } catch (const afflux::Error& error) {
    std::printf("error %s\n", error.what());
  }
  for (const afflux::Backend& backend : afflux::backends())
    if (backend.chosen) std::printf("chosen %s\n", backend.name.c_str());
  return 0;
}
