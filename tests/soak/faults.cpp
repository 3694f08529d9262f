// A disk that fails on demand. Preloaded, it stands before the C library: what the process, SQLite included, asks of
// the disk that one folder is on is counted, and one of these calls fails, is cut short, or is the process' last. Or
// the folder's file system has no locks of one kind, or no memory maps.
//
// It also takes down what an honest disk would hold after a power cut, if asked to: each file as it was when it was
// last flushed, each folder's names likewise.

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

namespace {

enum How { kCount, kOnce, kFromHere, kStop, kTear, kShort, kNoFlock, kNoFcntl, kNoMmap };

std::string folder, flushed;
How how = kCount;
int error = 0;
long at = -1;
std::atomic<long> calls{0};
std::atomic<bool> armed{false};
thread_local bool busy = false;  // taking down: these calls are not the process' own

// The C library's own function.
#define REAL(name) static const auto real = reinterpret_cast<decltype(&::name)>(dlsym(RTLD_NEXT, #name))

std::string path_of(int descriptor) {
  char link[64], path[4096];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t length = readlink(link, path, sizeof path);
  return std::string(path, length < 0 ? 0 : static_cast<std::size_t>(length));
}

bool ours(const char* path) {
  return armed && !busy && path != nullptr && std::strncmp(path, folder.c_str(), folder.size()) == 0;
}
bool ours(int descriptor) { return armed && !busy && ours(path_of(descriptor).c_str()); }

enum class Fate { kGo, kFail, kHalf, kHalfAndStop };

// What becomes of the next call of the folder's. One that only reads needs no space.
Fate next(bool reads = false) {
  if (how >= kNoFlock || (reads && error == ENOSPC)) return Fate::kGo;
  const long call = calls++;
  if (how == kCount || call < at || (call > at && how != kFromHere)) return Fate::kGo;
  if (how == kStop) kill(getpid(), SIGKILL);
  if (how == kTear) return Fate::kHalfAndStop;
  if (how == kShort) return Fate::kHalf;
  errno = error;
  return Fate::kFail;
}

// Of a call that the file system does not have.
bool lacks(How what, int descriptor) {
  if (how != what || descriptor < 0 || !ours(descriptor)) return false;
  errno = error;
  return true;
}

// Of what cannot be done by half.
bool fails(bool reads = false) {
  const Fate fate = next(reads);
  if (fate == Fate::kHalfAndStop) kill(getpid(), SIGKILL);
  return fate == Fate::kFail;
}

template <class Write>
ssize_t written(std::size_t size, Write write) {
  const Fate fate = next();
  if (fate == Fate::kFail) return -1;
  const ssize_t done = write(fate == Fate::kGo ? size : (size + 1) / 2);
  if (fate == Fate::kHalfAndStop) kill(getpid(), SIGKILL);
  return done;
}

void copy_file(const std::string& from, const std::string& to) {
  std::FILE* in = std::fopen(from.c_str(), "rb");
  std::FILE* out = std::fopen(to.c_str(), "wb");
  char bytes[1 << 16];
  for (std::size_t got; (got = std::fread(bytes, 1, sizeof bytes, in)) > 0;) std::fwrite(bytes, 1, got, out);
  std::fclose(in);
  std::fclose(out);
}

void copy_names(const std::string& from, const std::string& to) {
  std::FILE* out = std::fopen(to.c_str(), "w");
  DIR* names = opendir(from.c_str());
  while (const dirent* entry = readdir(names)) {
    const auto inode = static_cast<unsigned long>(entry->d_ino);
    if (entry->d_name[0] != '.') std::fprintf(out, "%d %lu %s\n", entry->d_type == DT_DIR, inode, entry->d_name);
  }
  closedir(names);
  std::fclose(out);
}

// What is on the disk itself from now on.
void take_down(int descriptor) {
  struct stat facts;
  if (flushed.empty() || fstat(descriptor, &facts) != 0) return;
  const std::string to = flushed + "/" + std::to_string(facts.st_ino);
  busy = true;
  S_ISDIR(facts.st_mode) ? copy_names(path_of(descriptor), to) : copy_file(path_of(descriptor), to);
  busy = false;
}

}  // namespace

extern "C" {

// From here on calls count; the one numbered `at` meets its end as `how` and `error` say. What is flushed is copied
// to the folder `flushed_`, under the number of its inode, if that is not empty.
void faults_arm(const char* folder_, long at_, int how_, int error_, const char* flushed_) {
  folder = folder_, flushed = flushed_, at = at_, how = static_cast<How>(how_), error = error_, calls = 0;
  armed = true;
}

// Returns how many calls there were.
long faults_disarm() {
  armed = false;
  return calls;
}

#define OPEN(name)                                                                    \
  int name(const char* path, int flags, ...) {                                        \
    REAL(name);                                                                       \
    va_list rest;                                                                     \
    va_start(rest, flags);                                                            \
    const unsigned mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, unsigned) : 0; \
    va_end(rest);                                                                     \
    return ours(path) && fails(!(flags & O_CREAT)) ? -1 : real(path, flags, mode);    \
  }
OPEN(open)
OPEN(open64)

int mkdir(const char* path, mode_t mode) noexcept {
  REAL(mkdir);
  return ours(path) && fails() ? -1 : real(path, mode);
}

int rename(const char* from, const char* to) noexcept {
  REAL(rename);
  return ours(from) && fails() ? -1 : real(from, to);
}

int unlink(const char* path) noexcept {
  REAL(unlink);
  return ours(path) && fails() ? -1 : real(path);
}

#define SYNC(name)                                    \
  int name(int descriptor) {                          \
    REAL(name);                                       \
    const bool counts = ours(descriptor);             \
    if (counts && fails()) return -1;                 \
    const int result = real(descriptor);              \
    if (counts && result == 0) take_down(descriptor); \
    return result;                                    \
  }
SYNC(fsync)
SYNC(fdatasync)

#define TRUNCATE(name)                                                \
  int name(int descriptor, off_t size) noexcept {                     \
    REAL(name);                                                       \
    return ours(descriptor) && fails() ? -1 : real(descriptor, size); \
  }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

// They return the error.
#define ALLOCATE(name)                                                          \
  int name(int descriptor, off_t begin, off_t size) {                           \
    REAL(name);                                                                 \
    return ours(descriptor) && fails() ? error : real(descriptor, begin, size); \
  }
ALLOCATE(posix_fallocate)
ALLOCATE(posix_fallocate64)

ssize_t write(int descriptor, const void* bytes, size_t size) {
  REAL(write);
  if (!ours(descriptor)) return real(descriptor, bytes, size);
  return written(size, [=](std::size_t part) { return real(descriptor, bytes, part); });
}

#define PWRITE(name)                                                                               \
  ssize_t name(int descriptor, const void* bytes, size_t size, off_t offset) {                     \
    REAL(name);                                                                                    \
    if (!ours(descriptor)) return real(descriptor, bytes, size, offset);                           \
    return written(size, [=](std::size_t part) { return real(descriptor, bytes, part, offset); }); \
  }
PWRITE(pwrite)
PWRITE(pwrite64)

ssize_t read(int descriptor, void* bytes, size_t size) {
  REAL(read);
  return ours(descriptor) && fails(true) ? -1 : real(descriptor, bytes, size);
}

#define PREAD(name, type, count)                                                         \
  ssize_t name(int descriptor, type bytes, count size, off_t offset) {                   \
    REAL(name);                                                                          \
    return ours(descriptor) && fails(true) ? -1 : real(descriptor, bytes, size, offset); \
  }
PREAD(pread, void*, size_t)
PREAD(pread64, void*, size_t)
PREAD(preadv, const iovec*, int)
PREAD(preadv64, const iovec*, int)

#define MMAP(name)                                                                                     \
  void* name(void* where, size_t size, int rights, int flags, int descriptor, off_t offset) noexcept { \
    REAL(name);                                                                                        \
    if (lacks(kNoMmap, descriptor)) return MAP_FAILED;                                                 \
    if (descriptor >= 0 && ours(descriptor) && fails(true)) return MAP_FAILED;                         \
    return real(where, size, rights, flags, descriptor, offset);                                       \
  }
MMAP(mmap)
MMAP(mmap64)

int flock(int descriptor, int operation) noexcept {
  REAL(flock);
  return lacks(kNoFlock, descriptor) ? -1 : real(descriptor, operation);
}

#define FCNTL(name)                                               \
  int name(int descriptor, int command, ...) {                    \
    REAL(name);                                                   \
    va_list rest;                                                 \
    va_start(rest, command);                                      \
    void* const argument = va_arg(rest, void*);                   \
    va_end(rest);                                                 \
    const bool locks = command == F_SETLK || command == F_SETLKW; \
    if (locks && lacks(kNoFcntl, descriptor)) return -1;          \
    return real(descriptor, command, argument);                   \
  }
FCNTL(fcntl)
FCNTL(fcntl64)

// MADV_POPULATE_READ and MADV_POPULATE_WRITE tell of what would be a SIGBUS.
int madvise(void* where, size_t size, int advice) noexcept {
  REAL(madvise);
  if (armed && (advice == 22 || advice == 23) && fails(advice == 22)) return errno = EFAULT, -1;
  return real(where, size, advice);
}

}  // extern "C"
