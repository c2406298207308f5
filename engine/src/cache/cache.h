// The expert cache: units in slots of one arena, read by a Reader, chosen by a Policy.
//
// Threads. Every function of Cache may be called from any thread at any time, but for the
// destructor. An Acquisition belongs to whoever acquired it: acquire, release and the
// destructor in one thread at a time; ready, wait, data, arrived, ready_first from as many
// threads as compute with it, between the two.
//
// Locks. One mutex guards the tables and the queue; it is held for microseconds, never
// during I/O or a callback. Readiness needs no lock: see slice_state.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache/policy.h"
#include "cache/stats.h"
#include "cache/unit.h"
#include "io/files.h"
#include "io/log.h"
#include "io/reader.h"

namespace moetuner {

struct CacheOptions {
    uint64_t budget = 0;        // bytes of the arena: a hard limit
    uint32_t piece = 128 << 10; // bytes of one read; rounded up to a multiple of the block
    bool lock = false;          // mlock the arena, on fault; CacheShape tells how far it went
    // Ask for transparent huge pages: a direct read then pins a few instead of hundreds, which
    // is most of what a read costs.
    bool hugepages = true;
    // How long wait() polls before it sleeps. 0: sleeps at once, which leaves the core to
    // the reader.
    uint32_t spin_ns = 0;
    // prefetch() takes no slot from a unit that was used within this many acquisitions.
    uint32_t prefetch_min_age = 4;
    PolicyFactory policy = make_lru;
};

class Cache;
struct Slot; // the cache's own

// Units pinned for one round of an operation: none of them is evicted before release().
// Units are addressed by i in 0 … size()-1, in the order they were asked for.
class Acquisition {
  public:
    Acquisition() = default; // empty
    ~Acquisition();          // releases
    Acquisition(Acquisition&& other) noexcept;
    Acquisition& operator=(Acquisition&& other) noexcept; // releases what it held

    size_t size() const { return entries_.size(); }
    bool empty() const { return entries_.empty(); }
    uint32_t unit(size_t i) const { return entries_[i].unit; }
    uint32_t position(size_t i) const { return entries_[i].position; } // in the list given

    // Positions for which there was no slot: acquire them when this round is released.
    const std::vector<uint32_t>& rest() const { return rest_; }

    // Whether slice `s` of unit `i` is there: one atomic load. Once true it stays true.
    // False for failed slices, and for those that nobody has asked for.
    bool ready(size_t i, unsigned s) const;

    // The first byte of the slice, at the file's own alignment modulo the block. Readable
    // for the slice's bytes once ready() or wait() said so, else only as far as arrived().
    const void* data(size_t i, unsigned s) const;

    // Blocks until the slice is there; returns data(). Null: its read failed for good (or
    // nobody has asked for it), error() tells. Any number of threads may wait
    // for the same slice.
    const void* wait(size_t i, unsigned s) const;

    // Bytes of the slice, from its first on, that are there: grows piece by piece to the
    // slice's size. For work on rows of a slice whose end is still on its way.
    uint64_t arrived(size_t i, unsigned s) const;

    // Blocks until arrived() is at least `bytes` (clamped to the slice's size); returns
    // what arrived() is then. 0: failed, as with wait().
    uint64_t wait_arrived(size_t i, unsigned s, uint64_t bytes) const;

    // All of 0 … size()-1, those whose slice `s` is ready first, each part in order.
    // Readiness is asked exactly once per unit, so that a slice that arrives meanwhile is
    // in one part or the other. `order` has size() places; returns how many are ready.
    size_t ready_first(unsigned s, uint32_t* order) const;

    // Why wait() gave null: file, offset, reason. Empty if the slice has not failed.
    std::string error(size_t i, unsigned s) const;

  private:
    friend class Cache;
    struct Entry {
        Slot* slot;
        uint32_t unit;
        uint32_t position;
    };
    Cache* cache_ = nullptr;
    std::vector<Entry> entries_;
    std::vector<uint32_t> rest_;
    uint64_t sequence_ = 0;        // of this acquisition among all of its cache
    mutable unsigned running_ = 0; // slice whose operation runs; under the cache's lock
};

class Cache {
  public:
    // Starts `reader`. `files` must outlive the cache. Throws Error: no unit, a slice that
    // is empty or reaches past the end of its file, a budget below one slot of each size,
    // memory or threads refused. Touches no page of the arena unless buffers are
    // registered.
    Cache(std::vector<UnitSpec> units, const CacheOptions& options, Files& files,
          std::unique_ptr<Reader> reader, Log log);

    // Drops what is queued, waits for the reads under way, joins the reader's threads,
    // unmaps the arena. All acquisitions must have been released.
    ~Cache();
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;

    // Pins units and queues reads of the slices that are missing: `slices.first` of all
    // units first, then the next slice, … (the order in which operations will want them).
    // Present units are pinned before any victim is chosen. If there are fewer slots than
    // units, a part is pinned (all that are present, then missing ones in order) and
    // rest() has the others: compute, release, acquire the rest.
    //
    // Pins at least one unit if n > 0. If every slot is pinned by other acquisitions it
    // blocks until one is released (first come, first served); so whoever calls it should
    // hold no acquisition of the same cache, else two such callers can wait for each
    // other. Use try_acquire there.
    //
    // A slice that failed is read anew if nobody else has its unit pinned. The same unit
    // may be listed twice. Submits reads from the calling thread where the reader can.
    Acquisition acquire(const uint32_t* units, size_t n, Slices slices = {});

    // The same, but never blocks: may pin nothing at all (all positions are in rest()).
    Acquisition try_acquire(const uint32_t* units, size_t n, Slices slices = {});

    // Unpins; `acquisition` is empty after it. Reads under way go on. Not while another
    // thread still uses the acquisition.
    void release(Acquisition& acquisition);

    // Queues reads behind those of all acquisitions, into free slots and those of units
    // not used lately (CacheOptions::prefetch_min_age). Pins nothing: an acquisition that
    // needs the slot drops what has not been submitted. Never blocks. Returns how many of
    // the units are in the cache or on their way.
    size_t prefetch(const uint32_t* units, size_t n, Slices slices = {});

    // Units in the cache, most recently useful first.
    std::vector<uint32_t> hot() const;

    // Reads units, hottest first, into free slots only, as prefetch() does; they are
    // evicted in the reverse order of the list. Returns how many were queued.
    size_t warm(const std::vector<uint32_t>& hottest_first);

    // Blocks until nothing is queued or under way.
    void drain();

    // At run time, from any thread.
    void set_depth(unsigned depth); // Reader::set_depth
    unsigned depth() const;
    unsigned max_depth() const;
    void set_spin(uint32_t ns);

    std::string describe_reader() const;
    CacheShape shape() const;
    // Each figure is exact, but they may be of slightly different moments.
    CacheStats stats() const;
    // One per layer: index is UnitSpec::layer.
    std::vector<LayerStats> layer_stats() const;

    uint32_t unit_count() const;
    uint64_t unit_bytes(uint32_t unit) const; // its slices, as the model has them
    // Slots that can hold units of this unit's size: how many can be pinned at once.
    uint32_t slots_for(uint32_t unit) const;

  private:
    friend class Acquisition;
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

} // namespace moetuner
