// Prints the normals of the random bits in a file, hexadecimal numbers; or a block of ChaCha20, by 12 such arguments:
// the words of key and nonce, and the number of the block.
#include <cstdio>
#include <cstdlib>

#include "formula/noise.hpp"

using namespace afflux::formula;

int main(int argc, char** argv) {
  unsigned long long radius, angle;
  if (argc == 2) {
    std::FILE* const file = std::fopen(argv[1], "r");
    while (file != nullptr && std::fscanf(file, "%llx %llx", &radius, &angle) == 2) {
      double first, second;
      box_muller(OneLane{}, std::uint64_t{radius}, std::uint64_t{angle}, first, second);
      std::printf("%a %a\n", first, second);
    }
    return 0;
  }
  std::uint32_t words[11], state[kBlockWords], block[kBlockWords];  // key and nonce
  for (int k = 0; k < 11; ++k) words[k] = static_cast<std::uint32_t>(std::strtoul(argv[1 + k], nullptr, 16));
  const auto number = static_cast<std::uint32_t>(std::strtoul(argv[12], nullptr, 16));
  chacha20_state(words, words + 8, number, [](std::uint32_t word) { return word; }, state);
  chacha20(state, block);
  for (const std::uint32_t word : block) std::printf("%08x ", word);
}
