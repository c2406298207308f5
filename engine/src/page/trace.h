// The router trace: which experts each token was given to, in a file. docs/engine.md has the
// format, moetuner/serve/trace.py reads it.
//
// A header, then rows of one size, little-endian. Whole rows are what counts: a process that
// dies leaves at most a piece of one at the end, which readers leave out.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "io/log.h"

namespace moetuner {

constexpr uint64_t trace_magic = 0x6563617274656f6d; // "moetrace"
constexpr uint32_t trace_version = 1;
constexpr size_t trace_header_bytes = 1024;
constexpr size_t trace_model_bytes = 928;

struct TraceHeader {
    uint64_t magic;
    uint32_t version;
    uint32_t header_bytes; // where the rows begin
    uint32_t row_bytes;
    uint32_t used;         // experts of one row
    uint32_t experts;      // of a layer, at most
    uint32_t layers;       // with experts
    uint64_t started_ns;   // CLOCK_REALTIME; rows count from there
    uint64_t model_bytes;  // of all experts
    char commit[48];       // of ggml
    char model[trace_model_bytes]; // the file; the end of a name that is too long
};
static_assert(sizeof(TraceHeader) == trace_header_bytes);
static_assert(offsetof(TraceHeader, started_ns) == 32 && offsetof(TraceHeader, commit) == 48);
static_assert(offsetof(TraceHeader, model) == 96);

// One token in one layer; `used` uint16 expert numbers follow, in the router's order.
struct TraceRow {
    uint32_t evaluation; // of a graph: counts from 0, in the order they began
    uint32_t ms;         // since the start
    uint16_t layer;      // the model's number
    uint16_t flags;      // 1: the layer's grouped experts (chexps)
    uint16_t row;        // the token's place in this evaluation: 0 … rows - 1
    uint16_t rows;       // of the layer in this evaluation
};
static_assert(sizeof(TraceRow) == 16);
constexpr uint16_t trace_grouped = 1;

// What a trace says of the model.
struct TraceModel {
    std::string name;
    std::string commit;
    uint64_t bytes = 0;
    uint32_t experts = 0;
    uint32_t layers = 0;
};

// What the router chose for the rows of one layer: int32 at ids + row × row_stride + k ×
// column_stride.
struct Choice {
    uint32_t evaluation = 0;
    uint32_t layer = 0;
    bool grouped = false;
    const void* ids = nullptr;
    size_t row_stride = 0;
    size_t column_stride = 0;
    uint32_t rows = 0;
    uint32_t used = 0;
};

struct TraceRefused : Error {
    TraceRefused(const std::string& text, int number) : Error(text), code(number) {}
    int code; // errno
};

class Trace {
  public:
    // Creates the file, or path.1, path.2, … if there is one: nothing is overwritten. Throws
    // TraceRefused. `log` gets one warning if it cannot be written any more: recording then stops.
    Trace(const std::string& path, TraceModel model, Log log);
    // Writes what is there, and closes. Waits for the disk.
    ~Trace();
    Trace(const Trace&) = delete;
    Trace& operator=(const Trace&) = delete;

    // Any thread. Copies, and leaves writing to a thread of its own: under memory pressure a
    // write waits for the disk, and the compute threads would wait with it. Rows for which
    // there is no room (the disk is slower than the model) are lost, all of a layer at once.
    void add(const Choice& choice);

    struct Status {
        uint64_t rows = 0; // taken by add()
        uint64_t lost = 0;
        int error = 0;     // errno; 0: it works
    };
    Status status() const;
    const std::string& file() const { return file_; }

  private:
    void run();
    bool write_all(const std::vector<std::byte>& data);

    const TraceModel model_;
    const Log log_;
    std::string file_;
    int fd_ = -1;
    int64_t started_ns_ = 0; // CLOCK_MONOTONIC
    uint64_t written_ = 0;   // bytes; the thread's
    size_t row_bytes_ = 0;   // set before there is anything to write

    mutable std::mutex mutex_; // guards all that follows
    std::condition_variable wake_;
    std::vector<std::byte> buffer_;
    uint32_t used_ = 0; // of the first row; 0: none yet
    Status status_;
    bool closing_ = false;
    std::thread thread_; // last: it uses all of the above
};

} // namespace moetuner
