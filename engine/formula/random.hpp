// A counter-based random number generator: the random bits are a function of a row's 64-bit key and a position, so they
// do not depend on threads, vectors or devices. Each block has 64 bits from the finalizer of splitmix64 (Steele, Lea
// and Flood 2014); each element of the block has 32 bits from a multiplication (constants: C. Wellons,
// hash-prospector).
#pragma once
#include "formula/fn.hpp"

namespace afflux::formula {

AFFLUX_FN std::uint64_t block_bits(std::uint64_t key, std::int64_t block) {
  std::uint64_t z = key + (static_cast<std::uint64_t>(block) + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// The factor of an element's index within its block. Their product plus `low` is the counter of `mixed`.
constexpr std::uint32_t kWeyl = 0x9E3779B9u;

// Returns the random bits of an element. W is a 32-bit word or a vector of words; low and high are the halves of
// block_bits. In all statistical tests that were made, the bits of each element are uniform, and those of any two
// elements independent. The upper bits are better than the lower ones.
template <class W>
AFFLUX_FN W mixed(W counter, W high) {
  return (counter ^ (counter >> 15) ^ high) * 0xD35A2D97u;
}

// Returns random bits that are all equally good.
template <class W>
AFFLUX_FN W mixed_well(W counter, W high) {
  W bits = mixed(counter, high);
  bits = (bits ^ (bits >> 16)) * 0x21F0AAADu;
  return bits ^ (bits >> 15);
}

}  // namespace afflux::formula
