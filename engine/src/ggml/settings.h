// What the user sets, through MOETUNER_* variables (docs/engine.md has the table).
#pragma once

#include <cstdint>
#include <string>

#include "io/reader.h"

namespace moetuner {

struct Settings {
    uint64_t cache_bytes = 0; // MOETUNER_CACHE_MIB; 0: not given
    ReaderOptions reader;     // MOETUNER_IO, MOETUNER_IO_DEPTH, MOETUNER_IO_THREADS
    uint32_t piece = 128 << 10; // MOETUNER_PIECE_KIB
    bool lock = true;         // MOETUNER_LOCK: mlock the arena and the dense weights
    bool direct = true;       // MOETUNER_DIRECT: O_DIRECT
    bool keep_dense = true;   // MOETUNER_RESIDENT: drop experts from the page cache, keep the rest
    bool hugepages = true;    // MOETUNER_HUGEPAGES
    uint32_t spin_us = 0;     // MOETUNER_SPIN_US
    std::string tensors;      // MOETUNER_TENSORS: only names that contain this; empty: all
    std::string hot_list;     // MOETUNER_HOT_LIST: file to warm from, and to save to at the end
    bool page = true;         // MOETUNER_PAGE: figures and control in a shared page
    std::string trace;        // MOETUNER_TRACE: file to record the router's choices to

    // Throws Error: the variable, its value and what it takes.
    static Settings from_environment();
};

} // namespace moetuner
