// The division of the engine's work among threads.
#pragma once
#include <cstdint>
#include <functional>

namespace afflux {

// Runs body(0) ... body(count - 1), each once, in any order, on up to num_threads threads (the caller's included), and
// returns when all are done. The other threads come from the pool (pool.hpp). An exception of `body` is rethrown here,
// after all threads that have begun have ended.
//
// Every thread, including the caller's, computes with round-to-nearest and with subnormals, whatever the caller's
// floating-point mode is (new threads inherit torch's flush-denormal setting). The caller's mode is restored.
void parallel_for(std::int64_t count, int num_threads, const std::function<void(std::int64_t)>& body);

// Does the same with only those threads of the pool that are spinning (`awake_helpers`): no thread is woken.
void parallel_for_awake(std::int64_t count, int num_threads, const std::function<void(std::int64_t)>& body);

// Does elementwise work over d elements: calls body(begin, end), as parallel_for does, for pieces of whole blocks that
// cover them.
void for_each_piece(std::int64_t d, int num_threads,
                    const std::function<void(std::int64_t begin, std::int64_t end)>& body);

// Returns the number of elements of each of these pieces except the last: a superblock, or a divisor of it that is a
// multiple of a block.
std::int64_t piece_size(std::int64_t d, int num_threads);

// Returns the number of threads, from 1 to num_threads, for work that reads and writes this number of bytes: one for
// each 512 KiB. One thread processes 512 KiB in about 50 us, and a sleeping helper needs as long to start. No bit of a
// result depends on the number. The environment variable AFFLUX_THREAD_BYTES sets the bytes for each thread; tests set
// it to 1. Throws Error if the variable is not a number of bytes; and if AFFLUX_SPIN_US is invalid and the result is
// more than 1. So a call that writes only afterwards has written nothing when it throws.
int threads_worth(std::int64_t bytes, int num_threads);

}  // namespace afflux
