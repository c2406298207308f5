// Ready ones first, asked once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace moetuner {

// Writes 0 … n-1 to `order`: those for which ready(i) was true, then the others, each part
// ascending; returns how many were ready. ready() is called exactly once for each i: its
// answer may change at any moment, and asked twice (once for either part) an i that
// becomes ready in between would be in neither.
template <typename Ready> size_t split_ready_first(size_t n, Ready&& ready, uint32_t* order) {
    size_t front = 0;
    size_t back = n;
    for (size_t i = 0; i < n; ++i) {
        if (ready(i)) {
            order[front++] = static_cast<uint32_t>(i);
        } else {
            order[--back] = static_cast<uint32_t>(i);
        }
    }
    std::reverse(order + front, order + n); // it was filled from the end
    return front;
}

} // namespace moetuner
