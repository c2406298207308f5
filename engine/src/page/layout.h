// The shared page: what lies where. docs/engine.md has the same as a table; readers written in
// other languages rely on it (moetuner/serve/page.py).
//
// Little-endian. A reader finds the sections by the offsets and sizes in the header, so that
// sections can grow, and new ones come, without a new version; what a writer does not know is 0.
// A change that an old reader would misread gets a new version.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cache/stats.h"

namespace moetuner {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the page is little-endian");

constexpr const char* page_name = "moetuner-experts"; // of the memfd
constexpr uint64_t page_magic = 0x72656e7574656f6d;   // "moetuner"
constexpr uint32_t page_version = 1;
constexpr size_t page_text = 960; // bytes of a file name, zeros after it

struct PageSection {
    uint32_t offset; // from the page's first byte
    uint32_t bytes;
};

// Written before the magic, which comes last; never again.
struct PageHeader {
    std::atomic<uint64_t> magic; // 0: the page is still being made
    uint32_t version;
    uint32_t bytes; // of the whole page
    PageSection identity;
    PageSection control;
    PageSection figures; // PageSequenced
    PageSection layers;  // `layer_count` rows of `layer_bytes`
    uint32_t layer_bytes;
    uint32_t layer_count;
    uint32_t spare[2];
};

// Like the header.
struct PageIdentity {
    uint32_t pid; // as the process sees it
    uint32_t spare;
    uint64_t made_ns;                 // CLOCK_REALTIME
    char commit[48];                  // of ggml
    char model[page_text - 16 - 48]; // the file; the end of a name that is too long
};

// Written by whoever controls the engine, one at a time (flock on the page), and read at the
// start of an operation. Nothing in it is trusted: numbers are clamped, text ends where the
// field does.
struct PageControl {
    std::atomic<uint32_t> generation;    // odd: being written; even and changed: obey
    std::atomic<uint32_t> depth;         // reads under way at once; 0: as the variables say
    std::atomic<uint32_t> threads;       // that compute; 0: as llama.cpp's -t
    std::atomic<uint32_t> trace_request; // changed: do what the next field says
    std::atomic<uint32_t> trace_on;      // 1: record to trace_file; else stop
    uint32_t spare[11];
    std::atomic<uint64_t> trace_file[page_text / 8];
};

enum class PageState : uint64_t {
    running = 1,
    failed = 2, // the last operation: an expert could not be read
    ended = 3,  // the model is unloaded; only readers hold the page
};
enum class TraceState : uint64_t { off = 0, on = 1, broken = 2 };

// All figures are of one moment, the last publication: up to page_interval_ns before the last
// operation of a graph that runs, and of its end when none runs.
struct PageFigures {
    uint64_t state;        // PageState
    uint64_t published_ns; // CLOCK_MONOTONIC
    uint64_t operations;   // layers' products: groups of matrices with the same experts
    uint64_t evaluations;  // graphs, up to their last layer
    uint64_t tokens;       // rows of the first layer, the warm-up run's too
    uint64_t failed;       // operations
    uint64_t applied;      // PageControl::generation that was last obeyed
    uint64_t threads;      // of the last operation
    uint64_t threads_given; // by llama.cpp's -t
    uint64_t depth;
    uint64_t depth_max;
    uint64_t budget; // CacheShape, from here on
    uint64_t arena_bytes;
    uint64_t peak_bytes;
    uint64_t locked_bytes;
    uint64_t lock_errno;
    uint64_t units;
    uint64_t slots;
    uint64_t used_slots;
    uint64_t block;
    uint64_t hits; // CacheStats, from here on: sums over the rows of layers
    uint64_t joined;
    uint64_t misses;
    uint64_t bytes;
    uint64_t waits;
    uint64_t wait_ns;
    uint64_t evictions;
    uint64_t rounds;
    uint64_t blocked;
    uint64_t prefetched;
    uint64_t prefetch_used;
    uint64_t prefetch_dropped;
    uint64_t reads;
    uint64_t retries;
    uint64_t buffered;
    uint64_t failures;
    uint64_t in_flight;
    uint64_t in_flight_high;
    uint64_t queued;
    uint64_t queued_high;
    uint64_t trace_state; // TraceState
    uint64_t trace_rows;  // recorded
    uint64_t trace_lost;  // not recorded: the disk was too slow
    uint64_t trace_errno; // why it is broken
    uint64_t model_bytes; // of all experts
    uint64_t experts;     // of a layer, at most
    uint64_t spare[17];
    uint64_t latency[latency_buckets]; // CacheStats::latency
    char trace_file[page_text];        // that is or was written
};

struct PageLayer {
    uint64_t layer; // the model's number of it
    uint64_t hits;
    uint64_t joined;
    uint64_t misses;
    uint64_t bytes;
    uint64_t waits;
    uint64_t wait_ns;
    uint64_t evictions;
};

constexpr size_t figure_words = sizeof(PageFigures) / 8;
constexpr size_t layer_words = sizeof(PageLayer) / 8;

// Figures and layers lie behind a sequence lock. See page.h.
struct PageSequenced {
    std::atomic<uint64_t> sequence; // odd: being written
    std::atomic<uint64_t> words[255];
};

constexpr size_t identity_offset = 64;
constexpr size_t control_offset = 1024;
constexpr size_t figures_offset = 2048;
constexpr size_t layers_offset = 4096;

static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == 8);
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);
static_assert(sizeof(PageHeader) == identity_offset);
static_assert(offsetof(PageHeader, identity) == 16 && offsetof(PageHeader, layer_bytes) == 48);
static_assert(sizeof(PageIdentity) == control_offset - identity_offset);
static_assert(offsetof(PageIdentity, commit) == 16 && offsetof(PageIdentity, model) == 64);
static_assert(sizeof(PageControl) == figures_offset - control_offset);
static_assert(offsetof(PageControl, trace_request) == 12);
static_assert(offsetof(PageControl, trace_file) == 64);
static_assert(sizeof(PageSequenced) == layers_offset - figures_offset);
static_assert(std::is_trivially_copyable_v<PageFigures> && figure_words <= 255);
static_assert(offsetof(PageFigures, applied) == 48 && offsetof(PageFigures, budget) == 88);
static_assert(offsetof(PageFigures, hits) == 160 && offsetof(PageFigures, in_flight) == 288);
static_assert(offsetof(PageFigures, experts) == 360 && offsetof(PageFigures, latency) == 504);
static_assert(offsetof(PageFigures, trace_file) == 696 && sizeof(PageFigures) == 1656);
static_assert(std::is_trivially_copyable_v<PageLayer> && sizeof(PageLayer) == 64);

} // namespace moetuner
