// A library to preload: the first look at AFFLUX_THREAD_BYTES or at the system's mounts takes long enough to be hit by
// a fork.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

namespace {

void wait_once(const char* name, const char* slow) {
  static bool first = true;
  if (first && std::strcmp(name, slow) == 0) first = false, usleep(300000);
}

}  // namespace

extern "C" char* getenv(const char* name) {
  wait_once(name, "AFFLUX_THREAD_BYTES");
  return reinterpret_cast<char* (*)(const char*)>(dlsym(RTLD_NEXT, "getenv"))(name);
}

extern "C" std::FILE* fopen(const char* path, const char* mode) {
  wait_once(path, "/proc/self/mountinfo");
  return reinterpret_cast<std::FILE* (*)(const char*, const char*)>(dlsym(RTLD_NEXT, "fopen"))(path, mode);
}
