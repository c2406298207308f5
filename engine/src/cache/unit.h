// Units: what is cached, evicted and counted as a whole.
#pragma once

#include <cstdint>
#include <vector>

#include "io/files.h"

namespace moetuner {

// One expert of one layer. Units are numbered by their place in the list that the cache
// was made with.
struct UnitSpec {
    // In the order in which operations use them: gate, up, down, or gate_up, down. At most
    // max_slices.
    std::vector<Extent> slices;
    uint32_t layer = 0; // for statistics; layers should be numbered from 0 without gaps
};

constexpr unsigned max_slices = 8;

// Which slices of every unit are meant: [first, end), clamped to what the unit has.
struct Slices {
    unsigned first = 0;
    unsigned end = max_slices;
};

} // namespace moetuner
