// The shared page of one cache: figures for whoever watches, wishes of whoever controls.
//
// It is an anonymous file (memfd) that this process has open: readers find it below
// /proc/PID/fd. So it goes with the process, however that ends, nobody can take its name, and
// only the same user and root get at it.
//
// Figures are behind a sequence lock: the number is odd while they are written, and another
// one after. Memory orders, good for Arm too: every word is a release store, so none is seen
// before the odd number; the even number is one, so it is not seen before the words. A reader
// loads number, words, number with acquire (the last may be relaxed: acquire loads keep what
// follows behind them). Fences would do with fewer ordered accesses, but ThreadSanitizer knows
// nothing of them, and a publication is a few hundred words.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "page/layout.h"

namespace moetuner {

// What PageControl asks for.
struct Wishes {
    uint32_t generation = 0;
    uint32_t depth = 0;
    uint32_t threads = 0;
    uint32_t trace_request = 0;
    bool trace_on = false;
    std::string trace_file;
};

class Page {
  public:
    // Throws Error: the system gives no such file. `layers`: rows of publish().
    Page(const std::string& model, const std::string& commit, uint32_t layers);
    ~Page(); // unmaps and closes; who has it open keeps it
    Page(const Page&) = delete;
    Page& operator=(const Page&) = delete;

    // One thread at a time. `layers`: as many as the constructor was told.
    void publish(const PageFigures& figures, const std::vector<PageLayer>& layers) noexcept;

    // Any thread. One acquire load. Changes whenever wishes() may.
    uint32_t generation() const noexcept;
    // Any thread. Nothing while they are being written: to be asked again later.
    std::optional<Wishes> wishes() const;

    int descriptor() const noexcept { return fd_; }
    // Its first byte, as this process has it.
    std::byte* memory() const noexcept { return base_; }

  private:
    std::byte* at(size_t offset) const noexcept { return base_ + offset; }

    int fd_ = -1;
    size_t bytes_ = 0;
    std::byte* base_ = nullptr;
    PageControl* control_ = nullptr;
    PageSequenced* sequenced_ = nullptr;
    std::atomic<uint64_t>* layers_ = nullptr;
    uint32_t layer_count_ = 0;
};

// The end of `text` that fits into `size` bytes, zeros after it.
void put_text(char* target, size_t size, const std::string& text) noexcept;

} // namespace moetuner
