// The thread pool. The engine creates no other threads.
#pragma once
#include <atomic>
#include <functional>

namespace afflux {

// A thread's share of a call. Once `stop` is true, a helper takes no more pieces. For the caller `stop` never becomes
// true, so it takes the remaining pieces.
using Work = std::function<void(const std::atomic<bool>& stop)>;

// Runs `work` on the caller's thread and on up to `helpers` other threads at the same time, and returns when all
// threads that have begun it have ended. Threads take the work piece by piece, and the caller does not wait for helpers
// that have not begun. So a helper that begins late, or never because no thread can be created, costs nothing. `work`
// must not throw. Throws Error if AFFLUX_SPIN_US is invalid.
//
// The helpers form one pool for the process. The first call that needs the pool creates it; the pool grows to the
// largest number of helpers ever requested. Calls of several threads share the pool. A call that finds all helpers busy
// starts alone, and helpers join it as they become free; so a call inside a call cannot block.
//
// An idle helper spins for AFFLUX_SPIN_US microseconds (yielding its CPU), then sleeps; it sleeps at once where the
// process may not use a CPU for each helper and for the caller. A forked child has none of the threads and creates its
// own pool. The threads end with the process, or when the library is unloaded, even during a call. The threads handle
// no signals except those of their own faults. They may use the CPUs that the process's first thread may use at the
// time of their creation, whichever thread makes the call.
void with_helpers(int helpers, const Work& work);

// Creates the pool, without threads. A call that is to use helpers calls it before it writes anything, because it
// throws Error if AFFLUX_SPIN_US is invalid.
void prepare_pool();

// Does the same with helpers that spin for work only. No helper is created or woken, which would take longer than short
// work does.
void with_awake_helpers(int helpers, const Work& work);
// Returns the current number of helpers that spin for work.
int awake_helpers();

}  // namespace afflux
