// A library to preload: the first to ask for AFFLUX_THREAD_BYTES waits for it long enough to be hit by a fork.
#include <dlfcn.h>
#include <unistd.h>

#include <cstring>

extern "C" char* getenv(const char* name) {
  static bool first = true;
  if (first && std::strcmp(name, "AFFLUX_THREAD_BYTES") == 0) first = false, usleep(300000);
  return reinterpret_cast<char* (*)(const char*)>(dlsym(RTLD_NEXT, "getenv"))(name);
}
