// A reader that misbehaves as devices and file systems do, for tests. Not part of the
// cache library: target moetuner_faults.
#pragma once

#include <cstdint>
#include <memory>

#include "io/reader.h"

namespace moetuner {

// Probabilities per attempt, in 1/1000.
struct Faults {
    uint64_t seed = 1;
    unsigned delay = 0; // holds the result back for up to max_delay_us
    uint32_t max_delay_us = 1000;
    unsigned reorder = 0;    // lets later results overtake this one
    unsigned short_read = 0; // reports fewer bytes; those not reported are overwritten
    unsigned eintr = 0;
    unsigned eagain = 0;
    unsigned eio = 0;             // overwrites the target
    unsigned einval = 0;          // direct attempts only
    unsigned hard_eio_file = ~0u; // every attempt on this file's [from, to) gives EIO
    uint64_t hard_from = 0;
    uint64_t hard_to = ~0ull;
};

// Wraps `inner`. The same seed gives the same faults for the same order of attempts.
std::unique_ptr<Reader> make_fault_reader(std::unique_ptr<Reader> inner, const Faults& faults);

} // namespace moetuner
