// The only place where the engine owns threads.
#pragma once
#include <atomic>
#include <functional>

namespace afflux {

// A thread's share of a call. Once `leave` is true it may take no more pieces: the caller, who never has to leave,
// takes the rest.
using Work = std::function<void(const std::atomic<bool>& leave)>;

// Runs work on the caller's thread and on up to `helpers` others at the same time, and returns when all that have
// begun it have ended. Work is shared by taking it piece by piece, so that a helper that comes late, or never because
// no thread can be made, costs nothing: the caller does not wait for those that have not begun. `work` must not throw.
//
// The others are one pool for the process, which no import makes but the first call that needs it, and which grows to
// the most helpers ever asked for. Calls of several threads share it; one that finds all at work elsewhere starts alone
// and is joined by those who get free. That is also why a call inside a call cannot block.
//
// A thread that has nothing to do looks for work for AFFLUX_SPIN_US microseconds (giving its CPU to whoever wants it),
// then sleeps; it sleeps at once where the process may not use a CPU for each of them and for the caller.
// A forked child has none of the threads and makes a pool of its own. They end when the process does, or when the
// library is unloaded, amid a call too. They take no signals, and may use the CPUs that the process's first thread may
// use when they are made, whichever thread's call that is.
void with_helpers(int helpers, const Work& work);

}  // namespace afflux
