// Counters of a cache. All grow from 0 and never shrink, unless told otherwise.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace moetuner {

struct LayerStats {
    // Units acquired = hits + joined + misses.
    uint64_t hits = 0;      // everything asked for was there
    uint64_t joined = 0;    // nothing to read, but reads begun earlier still under way
    uint64_t misses = 0;    // something had to be read
    uint64_t bytes = 0;     // that arrived from files, alignment included
    uint64_t waits = 0;     // times that a thread had to wait for a slice
    uint64_t wait_ns = 0;   // summed over threads
    uint64_t evictions = 0; // units that made room
};

// Latency of reads, from submission to completion: bucket k counts [2^k, 2^(k+1)) µs;
// the first also what is below, the last what is above.
constexpr size_t latency_buckets = 24;

struct CacheStats {
    LayerStats total;
    uint64_t rounds = 0;           // acquisitions that could not take all units
    uint64_t blocked = 0;          // acquisitions that waited for any slot at all
    uint64_t prefetched = 0;       // units whose reads prefetch() or warm() queued
    uint64_t prefetch_used = 0;    // of these: acquired later
    uint64_t prefetch_dropped = 0; // of these: given up before anyone used them
    uint64_t reads = 0;            // pieces that arrived
    uint64_t retries = 0;          // attempts after the first of a piece
    uint64_t buffered = 0;         // attempts that went through the page cache
    uint64_t failures = 0;         // pieces that failed for good
    uint32_t in_flight = 0;        // now
    uint32_t in_flight_high = 0;   // most ever
    uint32_t queued = 0;           // slices with pieces not yet submitted, now
    uint32_t queued_high = 0;
    std::array<uint64_t, latency_buckets> latency{};
};

// What the cache is made of.
struct CacheShape {
    uint64_t budget = 0;      // as given
    uint64_t arena_bytes = 0; // mapped: never more than the budget
    uint64_t peak_bytes = 0;  // of slots that were ever in use
    uint64_t locked_bytes = 0;
    int lock_errno = 0; // why not all of it is locked; 0 if it is, or nobody asked
    uint32_t units = 0;
    uint32_t slots = 0;
    uint32_t used_slots = 0; // now
    uint32_t classes = 0;    // of slot size
    uint64_t block = 0;      // alignment of direct reads
};

} // namespace moetuner
