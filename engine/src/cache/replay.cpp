#include "cache/replay.h"

#include <algorithm>
#include <ctime>
#include <deque>

#include "cache/cache.h"
#include "cache/clock.h"
#include "cache/layout.h"

namespace moetuner {
namespace {

double process_seconds() {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

struct Window {
    size_t units;    // acquired at the same time
    uint64_t budget; // for at least so many of every size
};

// Enough units that the reader never runs out of pieces while the oldest is waited for.
Window window_for(const std::vector<UnitSpec>& units, uint64_t block, uint64_t under_way) {
    uint64_t largest = 0;
    uint64_t smallest = ~0ULL;
    std::vector<uint64_t> sizes;
    for (const UnitSpec& unit : units) {
        const uint64_t bytes = slot_bytes(unit, block);
        largest = std::max(largest, bytes);
        smallest = std::min(smallest, bytes);
        sizes.push_back(bytes);
    }
    std::sort(sizes.begin(), sizes.end());
    sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
    Window window{};
    window.units = static_cast<size_t>(2 * under_way / smallest + 3);
    window.budget = largest * window.units * sizes.size();
    return window;
}

// Waits for the oldest; its error if it failed.
std::string finish_oldest(std::deque<Acquisition>& window, const std::vector<UnitSpec>& units) {
    const Acquisition& oldest = window.front();
    std::string error;
    for (unsigned s = 0; s < units[oldest.unit(0)].slices.size() && error.empty(); ++s) {
        if (oldest.wait(0, s) == nullptr) {
            error = oldest.error(0, s);
        }
    }
    window.pop_front();
    return error;
}

} // namespace

ReplayResult replay(const std::vector<UnitSpec>& units, const std::vector<uint32_t>& order,
                    const ReplayOptions& options, Files& files, const Log& log) {
    for (const uint32_t unit : order) {
        if (unit >= units.size()) {
            throw Error("there is no expert number " + std::to_string(unit));
        }
    }
    std::unique_ptr<Reader> reader = make_reader(options.reader, files, log);
    const Window window =
        window_for(units, files.block(), uint64_t{reader->depth()} * options.piece);
    CacheOptions cache_options;
    cache_options.budget = window.budget;
    cache_options.piece = options.piece;
    cache_options.hugepages = options.hugepages;
    Cache cache(units, cache_options, files, std::move(reader), log);

    ReplayResult result;
    result.reader = cache.describe_reader();
    std::deque<Acquisition> acquired; // destroyed before the cache
    const double cpu_begin = process_seconds();
    const int64_t begin = now_ns();
    for (size_t k = 0; k < order.size() && result.error.empty();) {
        if (acquired.size() < window.units) {
            Acquisition next = cache.try_acquire(&order[k], 1);
            if (!next.empty()) {
                acquired.push_back(std::move(next));
                ++k;
                continue;
            }
            if (acquired.empty()) { // the slot of its size is still being filled for nobody
                acquired.push_back(cache.acquire(&order[k], 1));
                ++k;
                continue;
            }
        }
        result.error = finish_oldest(acquired, units);
    }
    while (!acquired.empty()) {
        const std::string error = finish_oldest(acquired, units);
        result.error = result.error.empty() ? error : result.error;
    }
    result.seconds = static_cast<double>(now_ns() - begin) * 1e-9;
    result.cpu_seconds = process_seconds() - cpu_begin;
    result.bytes = cache.stats().total.bytes;
    return result;
}

} // namespace moetuner
