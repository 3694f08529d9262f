// The CPUs that the quotas of a process's control groups allow (Linux, versions 1 and 2), as containers set them.
#pragma once
#include <cmath>
#include <cstdio>
#include <sstream>
#include <string>

namespace afflux {
namespace quota {

inline std::string text_of(const std::string& path) {
  std::string text;
  if (std::FILE* const file = std::fopen(path.c_str(), "re")) {
    char part[4096];
    for (std::size_t size; (size = std::fread(part, 1, sizeof part, file)) > 0;) text.append(part, size);
    std::fclose(file);
  }
  return text;
}

inline bool holds(const std::string& list, const std::string& word) {
  return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

// Returns the quota of one group, in CPUs; 0: none.
inline double of_group(const std::string& folder, bool unified) {
  long long quota = 0, period = 0;
  if (unified) {
    std::sscanf(text_of(folder + "/cpu.max").c_str(), "%lld %lld", &quota, &period);  // "max 100000": no quota
  } else {
    std::sscanf(text_of(folder + "/cpu.cfs_quota_us").c_str(), "%lld", &quota);
    std::sscanf(text_of(folder + "/cpu.cfs_period_us").c_str(), "%lld", &period);
  }
  return quota > 0 && period > 0 ? static_cast<double>(quota) / static_cast<double>(period) : 0;
}

// Returns the smallest quota of a group and the groups above it, up to the mount of their file system.
inline double of_groups(const std::string& root, const std::string& group, const std::string& mounts, bool unified) {
  double least = 0;
  std::istringstream lines(mounts);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string word, top, point, kind, options;
    fields >> word >> word >> word >> top >> point;
    while (fields >> word && word != "-") {
    }
    fields >> kind >> word >> options;
    if (kind != (unified ? "cgroup2" : "cgroup") || !(unified || holds(options, "cpu"))) continue;
    // A container may see the names of groups that lie above its mount.
    std::string below = top == "/" ? group : group.compare(0, top.size(), top) == 0 ? group.substr(top.size()) : "";
    if (below.find("..") != std::string::npos || below.find('/') != 0) below.clear();
    for (;; below.resize(below.rfind('/'))) {
      const double here = of_group(root + point + below, unified);
      if (here > 0 && (least == 0 || here < least)) least = here;
      if (below.rfind('/') == std::string::npos) break;
    }
  }
  return least;
}

}  // namespace quota

// Returns the number of CPUs, rounded up; 0 without a quota. `root` precedes the paths of the system's files.
inline int cpu_quota(const std::string& root = "") {
  const std::string mounts = quota::text_of(root + "/proc/self/mountinfo");
  double least = 0;
  std::istringstream lines(quota::text_of(root + "/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {  // number:controllers:group
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && !quota::holds(controllers, "cpu")) continue;
    const double here = quota::of_groups(root, line.substr(second + 1), mounts, controllers.empty());
    if (here > 0 && (least == 0 || here < least)) least = here;
  }
  return static_cast<int>(std::ceil(least));
}

}  // namespace afflux
