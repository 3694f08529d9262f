// Moves vectors with almost no arithmetic: what this machine can do at best with given streams.
// Memory is float32 words throughout; tiles are whole multiples of 64 elements. Compiled by native.py.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

extern "C" {
struct Stream {
  float* data;
  int64_t bytes_of_64;  // elements
};

struct Sweep {
  const Stream *reads, *writes, *in_place;
  int64_t num_reads, num_writes, num_in_place;
  int64_t elements, threads, laps;
  int64_t group;       // at most so many streams are added in one loop
  int64_t tile;        // elements
  int64_t ahead;       // bytes that are prefetched ahead of every stream; 0: none
  int64_t past_cache;  // the vectors written elsewhere: non-temporal stores
};
}

namespace {

constexpr int64_t CHUNK = 65536;  // elements that a thread takes at a time, as in the engine
constexpr int64_t MOST_TILE = 4096, MOST_BYTES = 8, MOST_GROUP = 16;
constexpr int64_t LINE = 16;  // words of a cache line
alignas(64) constexpr float ZEROS[MOST_TILE * MOST_BYTES / 4] = {};

typedef float Line __attribute__((vector_size(64), aligned(4), may_alias));

inline void store_past_cache(float* to, const Line& line) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, *reinterpret_cast<const __m512*>(&line));
#elif defined(__AVX__)
  for (int i = 0; i < 16; i += 8) _mm256_stream_ps(to + i, _mm256_loadu_ps(reinterpret_cast<const float*>(&line) + i));
#elif defined(__SSE2__)
  for (int i = 0; i < 16; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(reinterpret_cast<const float*>(&line) + i));
#else
  *reinterpret_cast<Line*>(to) = line;
#endif
}

inline void fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// to[i] = from[i] + sum over G streams; prefetches so many words ahead of the streams and of `to`
template <int G, bool Prefetch, bool PastCache>
void add(const float* const* streams, const float* from, float* to, int64_t n, int64_t ahead, int64_t to_ahead) {
  const float* s[G + 1];
  for (int g = 0; g < G; ++g) s[g] = streams[g];
  const auto one = [&](int64_t i) {
    float sum = from[i];
    for (int g = 0; g < G; ++g) sum += s[g][i];
    to[i] = sum;
  };
  int64_t i = 0;
  if (PastCache)
    while (i < n && reinterpret_cast<uintptr_t>(to + i) % 64 != 0) one(i++);
  for (; i + LINE <= n; i += LINE) {
    Line sum = *reinterpret_cast<const Line*>(from + i);
    for (int g = 0; g < G; ++g) {
      if (Prefetch) __builtin_prefetch(s[g] + i + ahead);
      sum += *reinterpret_cast<const Line*>(s[g] + i);
    }
    if (Prefetch && !PastCache) __builtin_prefetch(to + i + to_ahead, 1);
    if (PastCache)
      store_past_cache(to + i, sum);
    else
      *reinterpret_cast<Line*>(to + i) = sum;
  }
  while (i < n) one(i++);
  if (PastCache) fence();
}

using Add = void (*)(const float* const*, const float*, float*, int64_t, int64_t, int64_t);
using Counts = std::make_integer_sequence<int, MOST_GROUP + 1>;

template <bool Prefetch, bool PastCache, int... G>
Add adding(int64_t count, std::integer_sequence<int, G...>) {
  constexpr Add table[] = {add<G, Prefetch, PastCache>...};
  return table[count];
}

void add(int64_t count, const float* const* streams, const float* from, float* to, int64_t n, int64_t ahead,
         int64_t to_ahead, bool past_cache) {
  const bool prefetch = ahead > 0 || to_ahead > 0;
  const Add plain = prefetch ? adding<true, false>(count, Counts{}) : adding<false, false>(count, Counts{});
  const Add past = prefetch ? adding<true, true>(count, Counts{}) : adding<false, true>(count, Counts{});
  const Add f = past_cache ? past : plain;
  f(streams, from, to, n, ahead, to_ahead);
}

int64_t words_of(const Stream& stream, int64_t elements) { return elements * stream.bytes_of_64 / 256; }

bool alike(const Stream& a, const Stream& b) { return a.bytes_of_64 == b.bytes_of_64; }

// The streams i, i + 1, .. that are added in one loop: of one element size, at most a group; at element t
int64_t gather(const Sweep& sweep, int64_t i, int64_t t, const float** found) {
  int64_t count = 0;
  for (; i < sweep.num_reads && count < sweep.group && alike(sweep.reads[i], sweep.reads[i - count]); ++i)
    found[count++] = sweep.reads[i].data + words_of(sweep.reads[i], t);
  return count;
}

// Words of a tile's sum.
int64_t most_words(const Sweep& sweep, int64_t elements) {
  int64_t most = 0;
  for (int64_t i = 0; i < sweep.num_reads; ++i) most = std::max(most, words_of(sweep.reads[i], elements));
  for (int64_t i = 0; i < sweep.num_writes; ++i) most = std::max(most, words_of(sweep.writes[i], elements));
  for (int64_t i = 0; i < sweep.num_in_place; ++i) most = std::max(most, words_of(sweep.in_place[i], elements));
  return most;
}

// Tile by tile: the sum of the reads goes into `sum`, and from there to what is written and into what is in place.
// If nothing is, the sum runs on over the tiles.
void chunk(const Sweep& sweep, int64_t begin, int64_t end, float* sum) {
  const int64_t ahead = sweep.ahead / 4;
  const bool past = sweep.past_cache != 0;
  const float* streams[MOST_GROUP];
  for (int64_t t = begin, n; t < end; t += n) {
    n = end - t < sweep.tile ? end - t : sweep.tile;
    const auto words = [&](const Stream& stream) { return words_of(stream, n); };
    const auto here = [&](const Stream& stream) { return stream.data + words_of(stream, t); };
    const int64_t first = gather(sweep, 0, t, streams);
    if (sweep.num_writes == 1 && sweep.num_in_place == 0 && first > 0 && first == sweep.num_reads &&
        alike(sweep.reads[0], sweep.writes[0])) {  // straight to where it goes
      add(first, streams, ZEROS, here(sweep.writes[0]), words(sweep.writes[0]), ahead, ahead, past);
      continue;
    }
    if (sweep.num_writes + sweep.num_in_place > 0) std::memset(sum, 0, 4 * most_words(sweep, n));
    for (int64_t i = 0, count; i < sweep.num_reads; i += count) {
      count = gather(sweep, i, t, streams);
      add(count, streams, sum, sum, words(sweep.reads[i]), ahead, 0, false);
    }
    for (int64_t i = 0; i < sweep.num_writes; ++i)
      add(0, nullptr, sum, here(sweep.writes[i]), words(sweep.writes[i]), 0, ahead, past);
    for (int64_t i = 0; i < sweep.num_in_place; ++i) {
      float* own = here(sweep.in_place[i]);
      const float* added = sum;
      add(1, &added, own, own, words(sweep.in_place[i]), 0, ahead, false);
    }
  }
}

}  // namespace

// Makes the sweep `laps` times, each after the last; returns the sum of all that was read, if nothing is written.
extern "C" double afflux_probe(const Sweep* sweep) {
  const int64_t chunks = (sweep->elements + CHUNK - 1) / CHUNK;
  std::atomic<int64_t> next{0}, finished{0};
  std::vector<double> totals(sweep->threads, 0.0);
  const auto work = [&](int64_t thread) {
    alignas(64) float sum[MOST_TILE * MOST_BYTES / 4] = {};
    for (int64_t ticket; (ticket = next.fetch_add(1)) < sweep->laps * chunks; finished.fetch_add(1)) {
      while (finished.load() < ticket / chunks * chunks) std::this_thread::yield();
      const int64_t begin = ticket % chunks * CHUNK, end = begin + CHUNK;
      chunk(*sweep, begin, end < sweep->elements ? end : sweep->elements, sum);
    }
    for (float part : sum) totals[thread] += part;
  };
  std::vector<std::thread> others;
  for (int64_t thread = 1; thread < std::min(sweep->threads, chunks); ++thread) others.emplace_back(work, thread);
  work(0);
  for (std::thread& other : others) other.join();
  double total = 0;
  for (double part : totals) total += part;
  return total;
}

// Seconds of `rounds` rounds of twelve additions, four of them independent, that need nothing but the core's own slots.
extern "C" double afflux_additions(int64_t rounds) {
  int64_t a = 0, b = 0, c = 0, d = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < rounds; ++i)
    for (int part = 0; part < 3; ++part) {
      ++a, ++b, ++c, ++d;
      asm volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d));  // each is made
    }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A host's kernel: the weighted sum of vectors in float32, one after the other.
extern "C" void afflux_accumulate(float* out, const float* const* vectors, const float* weights, int64_t count,
                                  int64_t size) {
  std::fill(out, out + size, 0.0f);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < size; ++j) out[j] += weights[i] * vectors[i][j];
}
