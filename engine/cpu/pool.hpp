// The only place where the engine owns threads.
#pragma once
#include <atomic>
#include <functional>

namespace afflux {

// A thread's share of a call. Once `stop` is true, a helper takes no more pieces, and the caller, for which `stop`
// never becomes true, takes the rest.
using Work = std::function<void(const std::atomic<bool>& stop)>;

// Runs work on the caller's thread and on up to `helpers` others at the same time, and returns when all that have begun
// it have ended. Threads share work by taking it piece by piece, so a helper that begins late, or never because no
// thread can be created, costs nothing: the caller does not wait for helpers that have not begun. `work` must not
// throw.
//
// The helpers form one pool for the process. The first call that needs it creates the pool, which grows to the most
// helpers ever requested. Calls of several threads share it. A call that finds all helpers busy starts alone, and
// helpers join it as they become free; hence a call inside a call cannot block.
//
// An idle helper spins for AFFLUX_SPIN_US microseconds (yielding its CPU), then sleeps; it sleeps at once where the
// process may not use a CPU for each helper and for the caller. A forked child has none of the threads and creates its
// own pool. The threads end with the process, or when the library is unloaded, even during a call. They handle no
// signals, and may use the CPUs that the process's first thread may use at the time of their creation, whichever thread
// makes the call.
void with_helpers(int helpers, const Work& work);

// The same with helpers that spin for work: none is created or woken, which takes longer than short work does.
void with_awake_helpers(int helpers, const Work& work);
// The current number of these helpers.
int awake_helpers();

}  // namespace afflux
