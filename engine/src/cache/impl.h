// The inside of a cache. Functions are in acquire.cpp (who gets a slot), reads.cpp (what
// the reader is given) and wait.cpp (what compute threads do).
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cache/arena.h"
#include "cache/cache.h"
#include "cache/slots.h"
#include "io/recovery.h"

namespace moetuner {

struct Cache::Impl final : Source {
    Impl(std::vector<UnitSpec> units, const CacheOptions& options, Files& files,
         std::unique_ptr<Reader> reader, Log log);
    ~Impl() override;

    // --- acquire.cpp; each takes the lock ---
    Acquisition acquire(Cache& cache, const uint32_t* units, size_t n, Slices slices,
                        bool may_block);
    void release(Acquisition& acquisition);
    size_t prefetch(const uint32_t* units, size_t n, Slices slices);
    size_t warm(const std::vector<uint32_t>& hottest_first);
    std::vector<uint32_t> hot();

    // --- wait.cpp ---
    // Whether slice `s` of unit `i` is there, after waiting for it.
    bool wait(const Acquisition& acquisition, size_t i, unsigned s);
    uint64_t wait_arrived(const Acquisition& acquisition, size_t i, unsigned s, uint64_t bytes);
    std::string error(const Acquisition& acquisition, size_t i, unsigned s);
    uint64_t arrived(const SlotSlice& slice) const;

    // --- reads.cpp: Source ---
    size_t take(Attempt* out, size_t max) noexcept override;
    void done(const Attempt& attempt, int64_t result) noexcept override;
    void drain();

    // --- cache.cpp ---
    CacheShape shape();
    CacheStats stats();
    std::vector<LayerStats> layer_stats();

    // A piece on its way: from the first take() until it has arrived or failed.
    struct Piece {
        RangeRead read{};
        Slot* slot = nullptr;
        uint32_t slice = 0;
        uint32_t index = 0;
        uint32_t layer = 0;
        int64_t begun_ns = 0;
    };
    // What compute threads count without the lock; relaxed, they order nothing.
    struct Waits {
        std::atomic<uint64_t> count{0};
        std::atomic<uint64_t> ns{0};
    };
    enum class Got { there, coming, queued };

    // Helpers of acquire.cpp and reads.cpp: the lock is held.
    bool pin(Acquisition& acquisition, const uint32_t* units, size_t n, Slices slices);
    void ask_for(Acquisition& acquisition, Slices slices);
    Slot* make_room(uint32_t unit, uint64_t min_age, bool drop_queued);
    Slot* bring_in(uint32_t unit, uint64_t min_age, bool drop_queued);
    Got request(Slot& slot, uint32_t slice, const ReadKey& key, uint32_t own_pins);
    void abandon(Slot& slot);
    void abandon_speculation(uint32_t unit);
    bool someone_waits_for_room() const { return next_ticket_ != serving_; }
    void enqueue(SlotSlice& slice, const ReadKey& key);
    void dequeue(SlotSlice& slice);
    LayerStats& layer_of(uint32_t unit) { return layers_[units_[unit].layer]; }

    // Helpers of reads.cpp without the lock.
    void finish(uint32_t tag, const Judgement& judgement) noexcept;
    void record_failure(const Piece& piece, const std::string& text);
    std::string failure_text(const Piece& piece, int error) const;

    // Helpers of wait.cpp.
    void hasten(const Acquisition& acquisition, unsigned s);
    template <typename Enough>
    void sleep_until(const Acquisition& acquisition, size_t i, unsigned s, bool any_piece,
                     Enough&& enough);

    // Fixed once constructed.
    const std::vector<UnitSpec> units_;
    const CacheOptions options_;
    Files& files_;
    const Log log_;
    const uint64_t block_;
    const uint32_t piece_bytes_;
    const Layout layout_;
    Arena arena_;
    const std::unique_ptr<Reader> reader_; // has locks of its own
    std::unique_ptr<Waits[]> waits_;       // by layer
    std::atomic<uint32_t> spin_ns_;        // relaxed

    std::mutex mutex_; // guards all that follows
    SlotTable slots_;
    std::set<ReadKey> queue_;  // slices with pieces that no reader has seen yet
    std::deque<Piece> pieces_; // by tag; a piece is its taker's until done() puts it back
    std::vector<uint32_t> idle_pieces_;
    std::vector<uint32_t> retries_;
    std::map<std::pair<uint32_t, uint32_t>, std::string> errors_; // by slot and slice
    uint64_t sequence_ = 0;                                       // of acquisitions and prefetches
    uint64_t acquisitions_ = 0;
    uint64_t next_ticket_ = 0; // of those who acquire and may block
    uint64_t serving_ = 0;
    std::condition_variable room_;  // a slot may be had, or the next ticket's turn
    std::condition_variable quiet_; // nothing is queued or under way
    bool closing_ = false;
    std::vector<LayerStats> layers_; // but for waits
    CacheStats stats_;               // but for total
};

} // namespace moetuner
