// How exceptions become the statuses of C functions.
#pragma once
#include <exception>
#include <new>
#include <stdexcept>

#include "afflux/afflux.hpp"
#include "c/internal.h"

namespace afflux {

// Keeps the message for afflux_last_error(), and returns the status.
int failed(int status, const char* message);

// Calls the function, and returns the status for its exception.
template <class Call>
int guarded(const Call& call) {
  try {
    call();
    return AFFLUX_OK;
  } catch (const Unavailable& error) {
    return failed(AFFLUX_UNAVAILABLE, error.what());
  } catch (const std::invalid_argument& error) {  // Error, and those of control
    return failed(AFFLUX_INVALID, error.what());
  } catch (const std::bad_alloc&) {
    return failed(AFFLUX_NO_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return failed(AFFLUX_FAILED, error.what());
  }
}

}  // namespace afflux
