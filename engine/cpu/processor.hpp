// The identity of this machine's processor.
#pragma once
#include <string>
#if !defined(__aarch64__)
#include <cpuid.h>
#endif

namespace afflux {

struct Processor {
  std::string vendor;  // "AMD", "Intel", "ARM" or "another vendor's"
  int family;          // the vendor's number; 0: unknown
  int model;           // the number within the family
};

#if defined(__aarch64__)
inline Processor processor() { return {"ARM", 0, 0}; }
#else
inline Processor processor() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Processor found{"another vendor's", 0, 0};
  if (__get_cpuid(0, &a, &b, &c, &d) == 0) return found;
  if (b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx) found.vendor = "AMD";
  if (b == signature_INTEL_ebx && c == signature_INTEL_ecx && d == signature_INTEL_edx) found.vendor = "Intel";
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return found;
  const unsigned base = a >> 8 & 0xF, extended = a >> 20 & 0xFF;
  found.family = static_cast<int>(base == 0xF ? base + extended : base);
  found.model = static_cast<int>((a >> 4 & 0xF) | (base >= 6 ? a >> 12 & 0xF0 : 0));
  return found;
}
#endif

}  // namespace afflux
