// Who carries out reads. A reader makes attempts and reports what the kernel said; to
// continue short reads, retry and give up is the business of its source.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/files.h"
#include "io/log.h"

namespace moetuner {

// One read as the kernel gets it.
struct Attempt {
    uint64_t tag;    // the source's, handed back with the result
    uint64_t offset; // direct: multiple of Files::block()
    std::byte* target;
    uint32_t length; // direct: multiple of Files::block()
    uint32_t file;
    bool direct;
};

// Where a reader gets its work. Both functions are called from any thread.
class Source {
  public:
    virtual ~Source() = default;

    // Writes the most urgent attempts to `out`, at most `max`; returns how many. Never
    // blocks for long. What was taken will be given to done() exactly once.
    virtual size_t take(Attempt* out, size_t max) noexcept = 0;

    // `result`: bytes read (0 at the end of the file), or -errno. The bytes are in the
    // target before the call. Must not call the reader.
    virtual void done(const Attempt& attempt, int64_t result) noexcept = 0;
};

struct Memory {
    std::byte* base;
    size_t bytes;
};

class Reader {
  public:
    virtual ~Reader() = default; // a reader that was started must have been stopped

    // Begins to serve `source`; once. `memory` is where targets may lie: blocks that can
    // be registered with the kernel, each at most 1 GiB; no attempt straddles two.
    // Throws Error when threads or kernel objects are refused.
    virtual void start(Source& source, const std::vector<Memory>& memory) = 0;

    // The source has more. Any thread, between start() and the destructor. May submit from
    // the calling thread (io_uring) or wake another one (pool); never waits for a read.
    virtual void kick() noexcept = 0;

    // Waits for every attempt that was taken, ends the threads. The source must have ended
    // before: take() gives nothing more.
    virtual void stop() noexcept = 0;

    // Attempts under way at the same time, at most; the pool: its threads. Any thread, at
    // any time; clamped to 1 … max_depth(). Attempts that are under way stay.
    virtual void set_depth(unsigned depth) noexcept = 0;
    virtual unsigned depth() const noexcept = 0;
    virtual unsigned max_depth() const noexcept = 0;

    // For a log line: "io_uring, depth 32, registered files and buffers".
    virtual std::string describe() const = 0;
};

enum class ReaderKind { automatic, uring, pool };

struct ReaderOptions {
    ReaderKind kind = ReaderKind::automatic;
    unsigned depth = 32;  // io_uring
    unsigned threads = 8; // pool
    // io_uring: the reaper thread submits everything, else whoever acquires does.
    bool reaper_submits = false;
    // Registration pins the memory at once: all of the arena becomes resident at start,
    // and counts against RLIMIT_MEMLOCK. Refused → goes on without, and says so.
    bool register_buffers = false;
    bool register_files = true;
};

// `automatic`: io_uring, else the pool with one log line that tells why. `uring`: throws
// Error when the kernel, a sandbox or the build has none. `files` must outlive the reader.
std::unique_ptr<Reader> make_reader(const ReaderOptions& options, Files& files, const Log& log);

// Whether this build knows io_uring at all.
bool built_with_uring() noexcept;

} // namespace moetuner
