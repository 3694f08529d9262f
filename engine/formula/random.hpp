// Random bits by counting: a function of a row's 64-bit key and a position, so that nothing depends on threads, vectors
// or devices. 64 bits per block from splitmix64's finaliser (Steele, Lea and Flood 2014), then 32 for each element of
// the block from a multiplication (constants: C. Wellons, hash-prospector).
#pragma once
#include "formula/fn.hpp"

namespace afflux::formula {

AFFLUX_FN std::uint64_t block_bits(std::uint64_t key, std::int64_t block) {
  std::uint64_t z = key + (static_cast<std::uint64_t>(block) + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// What an element's index within its block is multiplied with; the sum with `low` is what `mixed` takes.
constexpr std::uint32_t kWeyl = 0x9E3779B9u;

// W is a 32-bit word or a vector of them; low and high are the halves of block_bits. Of each element uniform, and of
// any two independent in all statistical tests made; the upper bits are the better ones.
template <class W>
AFFLUX_FN W mixed(W counter, W high) {
  return (counter ^ (counter >> 15) ^ high) * 0xD35A2D97u;
}

// All bits alike.
template <class W>
AFFLUX_FN W mixed_well(W counter, W high) {
  W bits = mixed(counter, high);
  bits = (bits ^ (bits >> 16)) * 0x21F0AAADu;
  return bits ^ (bits >> 15);
}

}  // namespace afflux::formula
