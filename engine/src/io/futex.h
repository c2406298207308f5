// Sleep on a 32-bit word until it changes. Private to the process.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace moetuner {

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);

// Returns when woken, at once if the word is not `seen`, and at times for no reason: the
// caller looks again.
inline void futex_wait(const std::atomic<uint32_t>& word, uint32_t seen) noexcept {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

// All that sleep on the word. The word may have another meaning by now: they look again.
inline void futex_wake_all(const std::atomic<uint32_t>& word) noexcept {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

} // namespace moetuner
