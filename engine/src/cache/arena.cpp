#include "cache/arena.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "io/log.h"

namespace moetuner {
namespace {

constexpr uint64_t huge_page = 2ULL << 20;
constexpr uint64_t lock_step = 1ULL << 20; // finer than any limit worth having
constexpr unsigned lock_on_fault = 1;      // MLOCK_ONFAULT: glibc shows it to _GNU_SOURCE only

int lock_pages(void* base, uint64_t bytes) {
    if (syscall(SYS_mlock2, base, bytes, lock_on_fault) == 0) {
        return 0;
    }
    return errno;
}

} // namespace

Arena::Arena(uint64_t bytes, uint64_t alignment, bool hugepages, bool lock) : bytes_(bytes) {
    if (hugepages) {
        alignment = std::max(alignment, huge_page);
    }
    // Mapped with room to align, then cut to size: what stays is exactly `bytes`.
    const uint64_t mapped = bytes + alignment;
    void* memory = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        throw Error("no address space for a cache of " + std::to_string(bytes) +
                    " bytes: " + std::strerror(errno));
    }
    auto* first = static_cast<std::byte*>(memory);
    const auto address = reinterpret_cast<uintptr_t>(first);
    const uint64_t skip = (alignment - address % alignment) % alignment;
    base_ = first + skip;
    if (skip > 0) {
        munmap(first, skip);
    }
    if (alignment - skip > 0) {
        munmap(base_ + bytes, alignment - skip);
    }
    if (mprotect(base_, bytes, PROT_READ | PROT_WRITE) != 0) { // counts against the limits
        const int error = errno;
        munmap(base_, bytes);
        throw Error("no memory for a cache of " + std::to_string(bytes) +
                    " bytes: " + std::strerror(error));
    }
    madvise(base_, bytes, MADV_DONTFORK);
    madvise(base_, bytes, MADV_DONTDUMP);
    if (hugepages) {
        madvise(base_, bytes, MADV_HUGEPAGE);
    }
    if (lock) {
        lock_as_far_as_possible();
    }
}

Arena::~Arena() { munmap(base_, bytes_); }

void Arena::lock_as_far_as_possible() {
    lock_errno_ = lock_pages(base_, bytes_);
    if (lock_errno_ == 0) {
        locked_ = bytes_;
        return;
    }
    for (; locked_ < bytes_; locked_ = std::min(locked_ + lock_step, bytes_)) {
        if (lock_pages(base_ + locked_, std::min(lock_step, bytes_ - locked_)) != 0) {
            return;
        }
    }
}

} // namespace moetuner
