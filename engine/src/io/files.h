// The files that hold a model: one direct and one buffered descriptor each.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <string>

#include "io/log.h"

namespace moetuner {

// Some bytes of one file. Neither end need be aligned.
struct Extent {
    uint32_t file;   // what Files::add returned
    uint64_t offset; // from the beginning of the file
    uint64_t bytes;  // at least 1
};

// Files are added before the first reader starts (one thread); after that every function
// but add() may be called from any thread.
class Files {
  public:
    // `allow_direct` false: page cache only, as if every file had refused O_DIRECT, but
    // without the warning.
    explicit Files(Log log, bool allow_direct = true);
    ~Files();
    Files(const Files&) = delete;
    Files& operator=(const Files&) = delete;

    // Opens `path` twice, O_DIRECT and buffered, and returns its number (0, 1, …).
    // A file system that refuses O_DIRECT is no error: the file is read through the page
    // cache, with one warning. /proc/self/fd/N is a good path for a descriptor at hand;
    // `name` is what messages call the file. Throws Error if it cannot be opened.
    uint32_t add(const std::string& path, const std::string& name = {});

    uint32_t count() const { return static_cast<uint32_t>(files_.size()); }
    const std::string& name(uint32_t file) const { return files_[file].name; }
    uint64_t size(uint32_t file) const { return files_[file].size; } // when it was opened
    int descriptor(uint32_t file, bool direct) const {
        return direct ? files_[file].direct_fd : files_[file].buffered_fd;
    }

    // Whether the file is (still) read with O_DIRECT.
    bool direct(uint32_t file) const { return files_[file].direct.load(std::memory_order_relaxed); }

    // Reads `file` through the page cache from now on. The first call for a file warns,
    // with `why`. Blocks no longer than the log callback does.
    void turn_buffered(uint32_t file, const std::string& why) noexcept;

    // Forgets a range of the page cache that a buffered read left behind. Pages that
    // another mapping has locked stay. Errors are of no consequence.
    void forget(uint32_t file, uint64_t offset, uint64_t bytes) const noexcept;

    // What offsets, lengths and addresses of direct reads must be multiples of, over all
    // files: a power of two, at least 4096 (whole pages give the fewest segments, even
    // where the device would take 512).
    uint64_t block() const { return block_; }

  private:
    struct File {
        std::string name;
        uint64_t size = 0;
        int direct_fd = -1;
        int buffered_fd = -1;
        // Written by whoever meets a refusal, read before every attempt; relaxed, because
        // a late reader merely meets the refusal again.
        std::atomic<bool> direct{false};
    };

    const Log log_;
    const bool allow_direct_;
    uint64_t block_;
    std::deque<File> files_; // a deque: File cannot be moved
};

} // namespace moetuner
