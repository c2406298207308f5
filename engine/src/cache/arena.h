// The memory that all slots share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moetuner {

// One anonymous mapping. Pages appear when they are first written. Children do not inherit
// it (a fork during a direct read could copy a page away from under the device), core dumps
// leave it out.
class Arena {
  public:
    // `bytes`, `alignment`: multiples of the page size. Throws Error if it is refused.
    Arena(uint64_t bytes, uint64_t alignment, bool hugepages, bool lock);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    std::byte* base() const { return base_; }
    uint64_t bytes() const { return bytes_; }

    // Pages are locked when they appear, so that nothing is populated ahead of its use.
    uint64_t locked_bytes() const { return locked_; }
    int lock_errno() const { return lock_errno_; } // why that is not all; 0: it is, or not asked

  private:
    void lock_as_far_as_possible();

    std::byte* base_ = nullptr;
    uint64_t bytes_;
    uint64_t locked_ = 0;
    int lock_errno_ = 0;
};

} // namespace moetuner
