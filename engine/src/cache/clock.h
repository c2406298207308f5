#pragma once

#include <cstdint>
#include <ctime>

namespace moetuner {

inline int64_t now_ns() noexcept {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t{time.tv_sec} * 1000000000 + time.tv_nsec;
}

} // namespace moetuner
