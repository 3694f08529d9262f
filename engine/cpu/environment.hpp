// Settings from environment variables.
#pragma once
#include <cerrno>
#include <cstdlib>
#include <string>

#include "afflux/afflux.hpp"

namespace afflux {

// Returns at most 60 characters of the text, for a message. Bytes other than printable ASCII become '?'.
inline std::string printable(const std::string& text) {
  constexpr std::size_t kMost = 60;
  std::string shown = text.substr(0, kMost);
  for (char& c : shown)
    if (c < ' ' || c > '~') c = '?';
  return text.size() > kMost ? shown + "..." : shown;
}

// Returns the number in the environment variable `name`, or `otherwise` if the variable is not set or empty. Throws
// Error for any other text than a number from least to most; the message names `unit`.
inline long long from_environment(const char* name, const char* unit, long long least, long long most,
                                  long long otherwise) {
  const char* const wanted = std::getenv(name);
  if (wanted == nullptr || *wanted == '\0') return otherwise;
  char* end = nullptr;
  errno = 0;
  const long long number = std::strtoll(wanted, &end, 10);
  if (*end != '\0' || errno == ERANGE || number < least || number > most)
    throw Error(std::string(name) + " is '" + printable(wanted) + "', must be a number of " + unit + " from " +
                std::to_string(least) + " to " + std::to_string(most));
  return number;
}

}  // namespace afflux
