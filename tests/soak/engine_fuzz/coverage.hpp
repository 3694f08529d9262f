// Feedback for the fuzzer: which places of the engine a call has run, and about how often.
#pragma once

namespace coverage {

constexpr int kPlaces = 1 << 16;

// Forgets the last call.
void begin();
// How many places, with how often, the calls before this one have not run.
int new_places();
// How many places were ever run.
int places();

}  // namespace coverage
