#include "cpu/dispatch.hpp"

#include <atomic>
#include <cstdlib>

#include "afflux/afflux.hpp"
#include "api/kernels.hpp"
#include "cpu/environment.hpp"
#include "cpu/features.hpp"

namespace afflux {
namespace {

struct Isa {
  const char* name;
  const char* needs;
  const Kernels* table;
  bool (*runs)();
};

[[maybe_unused]] bool always() { return true; }

// The compiled instruction sets, best first.
#if defined(__aarch64__)
const Isa kIsas[] = {{"neon", "", &neon::kernels, always}};
#else
const Isa kIsas[] = {
#if defined(AFFLUX_HAS_AVX512)
    {"avx512", "AVX-512 F, DQ, BW and VL", &avx512::kernels, features::avx512},
#endif
#if defined(AFFLUX_HAS_AVX2)
    {"avx2", "AVX2, FMA and F16C", &avx2::kernels, features::avx2},
#endif
#if defined(AFFLUX_HAS_BASELINE)
    {"baseline", "", &baseline::kernels, always},
#endif
};
#endif

std::atomic<const Isa*> chosen{nullptr};

std::string known_names() {
  std::string names;
  for (const Isa& isa : kIsas) names += std::string(names.empty() ? "" : ", ") + isa.name;
  return names;
}

const Isa* find(const std::string& name, const std::string& asked_by) {
  for (const Isa& isa : kIsas) {
    if (name != isa.name) continue;
    if (!isa.runs()) throw Unavailable(asked_by + " asks for '" + name + "', but this CPU lacks " + isa.needs);
    return &isa;
  }
  throw Unavailable(asked_by + " asks for '" + printable(name) + "', which is unknown here; known: " + known_names());
}

const Isa* initial() {
  const char* const wanted = std::getenv("AFFLUX_ISA");
  if (wanted != nullptr && *wanted != '\0') return find(wanted, "AFFLUX_ISA");
  for (const Isa& isa : kIsas)
    if (isa.runs()) return &isa;
  throw Unavailable("no compiled instruction set runs on this CPU");
}

const Isa* current() {
  const Isa* isa = chosen.load(std::memory_order_acquire);
  if (isa == nullptr) {
    isa = initial();
    const Isa* nobody = nullptr;
    if (!chosen.compare_exchange_strong(nobody, isa)) isa = nobody;  // another thread was first
  }
  return isa;
}

}  // namespace

const Kernels& kernels() { return *current()->table; }

void choose_isa(const std::string& name) { chosen.store(find(name, "choose_isa"), std::memory_order_release); }

std::vector<Backend> backends() {
  std::vector<Backend> list;
  const Isa* const now = current();
  for (const Isa& isa : kIsas)
    list.push_back(
        {isa.name, "cpu", true, isa.runs(), &isa == now, isa.runs() ? "" : std::string("this CPU lacks ") + isa.needs});
  const std::string missing = why_not({DeviceKind::cuda, 0});
  list.push_back({"cuda", "cuda", cuda::backend() != nullptr, missing.empty(), false, missing});
  return list;
}

}  // namespace afflux
