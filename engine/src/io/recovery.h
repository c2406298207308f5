// What to do about the result of a read: go on, try again, give up. Decisions only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "io/reader.h"

namespace moetuner {

// A range that has to arrive, and how far it is.
struct RangeRead {
    uint64_t offset;   // multiple of the block
    std::byte* target; // multiple of the block; room for `length`
    uint32_t file;
    uint32_t length;       // multiple of the block: what a direct read asks for
    uint32_t needed;       // at most `length`: with these bytes the range has arrived
    uint32_t done = 0;     // bytes that are there, from `offset` on
    uint32_t hindered = 0; // consecutive results that were nobody's fault
    bool buffered = false; // this range goes through the page cache from here on
    bool retried = false;  // it had its one more chance after an error
};

// After this many in a row a hindrance is an error. A pause of a millisecond each after the
// first few makes that about one second.
constexpr uint32_t most_hindrances = 1000;
constexpr uint32_t hindrances_without_pause = 8;

enum class Verdict {
    arrived,
    again,        // make next_attempt()
    again_paused, // likewise, but wait a millisecond first
    failed,
};

struct Judgement {
    Verdict verdict;
    int error = 0;               // failed: errno, or 0 for the end of the file
    bool refused_direct = false; // the file cannot be read with O_DIRECT after all
};

Attempt next_attempt(const RangeRead& read, uint64_t tag, bool file_is_direct) noexcept;

// Takes `result` (bytes or -errno) of `attempt`, which next_attempt() made, into account.
//
// Short reads go on where they stopped: direct ones through the page cache if that is not at
// a block, since a direct read cannot begin there. EINVAL and the like for a direct read:
// the same bytes through the page cache. Every other error, and an end of file met by a
// direct read: once more through the page cache, then failed.
Judgement judge(RangeRead& read, const Attempt& attempt, int64_t result, uint64_t block) noexcept;

} // namespace moetuner
