// Who may stay in the page cache: dense weights yes, experts no.
//
// Under memory pressure a dense page that was dropped is read again by page fault, with the
// experts around it: a token then costs hundreds of MiB. So the experts' pages are given back
// after loading, and the dense ranges are read and locked.
#pragma once

#include <cstdint>
#include <vector>

#include "ggml/mapping.h"

namespace moetuner {

// Mapped expert weights. `address` may be memory that is no mapping of `place`: then only
// the page cache of the file is given back.
struct MappedRange {
    const void* address;
    uint64_t bytes;
    FilePlace place;
};

struct Residency {
    uint64_t dense_bytes = 0;  // of mapped tensors that are no experts
    uint64_t locked_bytes = 0; // of these
    int lock_errno = 0;        // why not all; 0 if all, or not asked
};

// Never throws: what the kernel refuses stays as it was.
Residency make_dense_resident(const std::vector<MappedRange>& experts, bool lock);

} // namespace moetuner
