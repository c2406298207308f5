// Reads a page as the layout says, and writes wishes, without the code that made it.
#pragma once

#include <cstring>
#include <string>
#include <unistd.h>
#include <vector>

#include "page/page.h"

namespace support {

using namespace moetuner;

struct Snapshot {
    uint64_t sequence = 0;
    PageFigures figures{};
    std::vector<PageLayer> layers;
};

// In the process's own memory, as a reader in C++ does it. False: it was written meanwhile.
inline bool read_page(const Page& page, Snapshot& out) {
    const auto& header = *reinterpret_cast<const PageHeader*>(page.memory());
    if (header.magic.load(std::memory_order_acquire) != page_magic) {
        return false;
    }
    const auto* sequenced =
        reinterpret_cast<const PageSequenced*>(page.memory() + header.figures.offset);
    const auto* rows =
        reinterpret_cast<const std::atomic<uint64_t>*>(page.memory() + header.layers.offset);
    out.sequence = sequenced->sequence.load(std::memory_order_acquire);
    const auto load = [](void* target, const std::atomic<uint64_t>* words, size_t count) {
        for (size_t i = 0; i < count; ++i) {
            const uint64_t word = words[i].load(std::memory_order_acquire);
            std::memcpy(static_cast<std::byte*>(target) + 8 * i, &word, 8);
        }
    };
    load(&out.figures, sequenced->words, figure_words);
    out.layers.resize(header.layer_count);
    load(out.layers.data(), rows, header.layer_count * layer_words);
    return out.sequence % 2 == 0 &&
           sequenced->sequence.load(std::memory_order_relaxed) == out.sequence;
}

inline Snapshot read_settled(const Page& page) {
    Snapshot snapshot;
    while (!read_page(page, snapshot)) {
    }
    return snapshot;
}

// By system calls, as other processes do it. Leaves the generation odd if `unfinished`.
inline void wish(const Page& page, const Wishes& wishes, bool unfinished = false) {
    const auto put = [&page](size_t at, const void* data, size_t bytes) {
        const auto offset = static_cast<off_t>(control_offset + at);
        return pwrite(page.descriptor(), data, bytes, offset) == static_cast<ssize_t>(bytes);
    };
    uint32_t generation = page.generation() | 1U;
    bool good = put(0, &generation, 4);
    const uint32_t numbers[4] = {wishes.depth, wishes.threads, wishes.trace_request,
                                 wishes.trace_on ? 1U : 0U};
    good = good && put(4, numbers, sizeof numbers);
    char text[page_text] = {};
    std::memcpy(text, wishes.trace_file.data(), std::min(wishes.trace_file.size(), page_text));
    good = good && put(64, text, sizeof text);
    ++generation;
    good = good && (unfinished || put(0, &generation, 4));
    if (!good) {
        std::abort();
    }
}

} // namespace support
