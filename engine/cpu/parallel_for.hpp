// How the engine shares work among threads.
#pragma once
#include <cstdint>
#include <functional>

namespace afflux {

// Runs body(0) ... body(count - 1), each once, in any order, on up to num_threads threads (the caller's included), and
// returns when all are done. Every thread, including the caller's, computes with round-to-nearest and with subnormals,
// whatever mode the caller is in (torch's flush-denormal setting is inherited by new threads); the caller's mode is
// restored. The other threads come from the pool (pool.hpp). An exception of `body` is rethrown here, after all threads
// that have begun have ended.
void parallel_for(std::int64_t count, int num_threads, const std::function<void(std::int64_t)>& body);

// The same on threads of the pool that are spinning (`awake_helpers`): no thread is woken.
void parallel_for_awake(std::int64_t count, int num_threads, const std::function<void(std::int64_t)>& body);

// The same for elementwise work over d elements: body(begin, end) for pieces of whole blocks that cover them.
void for_each_piece(std::int64_t d, int num_threads,
                    const std::function<void(std::int64_t begin, std::int64_t end)>& body);

// The elements of each of these pieces but the last: whole blocks, which divide a superblock, or a superblock.
std::int64_t piece_size(std::int64_t d, int num_threads);

// The number of threads, at most num_threads, for work that reads and writes this number of bytes: one for each 512
// KiB.
// One thread processes 512 KiB in about 50 us, and a sleeping helper needs as long to start. No bit depends on it. The
// environment variable AFFLUX_THREAD_BYTES sets the bytes for each thread; tests set it to 1.
int threads_worth(std::int64_t bytes, int num_threads);

}  // namespace afflux
