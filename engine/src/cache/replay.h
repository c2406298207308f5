// How fast the same misses could be read if nothing were computed: the bound for decode.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache/unit.h"
#include "io/files.h"
#include "io/log.h"
#include "io/reader.h"

namespace moetuner {

struct ReplayOptions {
    ReaderOptions reader;
    uint32_t piece = 128 << 10;
    bool hugepages = true;
};

struct ReplayResult {
    uint64_t bytes = 0;     // that arrived, alignment included
    double seconds = 0;     // wall clock, from the first submission to the last arrival
    double cpu_seconds = 0; // of the process meanwhile, user and system
    std::string reader;
    std::string error; // not empty: a read failed, the figures are of what came before
};

// Reads the units of `order` in that order with the cache's own machinery at full depth,
// through a window of a few units' slots. A unit that recurs within the window is read once.
// Throws Error as the constructor of Cache does.
ReplayResult replay(const std::vector<UnitSpec>& units, const std::vector<uint32_t>& order,
                    const ReplayOptions& options, Files& files, const Log& log);

} // namespace moetuner
