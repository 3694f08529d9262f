// How the engine shares work among threads.
#pragma once
#include <cstdint>
#include <functional>

namespace afflux {

// Runs body(0) ... body(count - 1), each once, in any order, on up to num_threads threads (the caller's included), and
// returns when all are done. Every thread, the caller's too, computes with round-to-nearest and with subnormals kept,
// whatever mode the caller is in (torch's flush-denormal setting leaks into new threads); the caller's is put back.
// The others come from the pool (pool.hpp). An exception of `body` is rethrown here, once all that have begun have
// ended.
void parallel_for(std::int64_t count, int num_threads, const std::function<void(std::int64_t)>& body);

// The same on threads of the pool that are spinning (`awake_helpers`): no thread is woken.
void parallel_for_awake(std::int64_t count, int num_threads, const std::function<void(std::int64_t)>& body);

// The same for elementwise work over d elements: body(begin, end) for pieces of whole blocks that cover them.
void for_each_piece(std::int64_t d, int num_threads,
                    const std::function<void(std::int64_t begin, std::int64_t end)>& body);

// The elements of each of these pieces but the last: whole blocks, which divide a superblock, or a superblock.
std::int64_t piece_size(std::int64_t d, int num_threads);

// How many of num_threads are worth it for work that reads and writes so many bytes: one for 512 KiB, which takes a
// thread about 50 us, and as long takes a helper that sleeps to come. No bit depends on it; the environment's
// AFFLUX_THREAD_BYTES says how many bytes are worth a thread, which tests set to 1.
int threads_worth(std::int64_t bytes, int num_threads);

}  // namespace afflux
