// Which unit is in which slot. No lock of its own: everything here happens under the
// cache's, but for what slice_state.h says.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "cache/arena.h"
#include "cache/layout.h"
#include "cache/policy.h"
#include "cache/slice_state.h"
#include "cache/unit.h"

namespace moetuner {

// Where the reads of one slice stand among all that are queued: the least is first.
struct ReadKey {
    // 0: the operation that runs now; k: the k-th after it; background_stage: nobody's yet.
    uint32_t stage = 0;
    uint64_t sequence = 0; // of the acquisition or prefetch
    uint32_t place = 0;    // of the unit in it
    uint32_t slot = 0;     // with the slice: tells two keys apart
    uint32_t slice = 0;

    bool operator<(const ReadKey& other) const;
};
constexpr uint32_t background_stage = 1U << 16;

// One slice in a slot. What is not atomic is written under the cache's lock while nobody
// has the slot pinned (`next`, `queued`, `key`: at any time, and read under it only).
struct SlotSlice {
    SliceState state;
    std::byte* region = nullptr;
    Extent extent{};
    SliceRead read{};
    uint32_t next = 0; // the first piece that was not handed to the reader
    bool queued = false;
    ReadKey key;
};

constexpr uint32_t no_unit = ~0U;

struct Slot {
    uint32_t number = 0;
    std::byte* base = nullptr;
    uint32_t unit = no_unit;
    uint32_t pins = 0;
    uint64_t last_used = 0;       // in acquisitions
    bool speculative = false;     // read ahead, and not used yet
    std::deque<SlotSlice> slices; // as many as its class's units have at most
    uint32_t slice_count = 0;     // of this unit

    bool idle() const;            // no piece is queued or under way
    bool idle_but_queued() const; // none is under way
};

class SlotTable {
  public:
    SlotTable(const std::vector<UnitSpec>& units, Layout layout, std::byte* arena,
              uint64_t block, uint32_t piece, const PolicyFactory& policy);

    Slot* find(uint32_t unit) { return slot_of_[unit]; }
    Slot& at(uint32_t slot) { return slots_[slot]; }
    Policy& policy(uint32_t size_class) { return *policies_[size_class]; }
    Policy& policy_of(uint32_t unit) { return policy(layout_.class_of[unit]); }
    const Layout& layout() const { return layout_; }

    // A slot of the unit's class that nothing is in; null if there is none.
    Slot* take_free(uint32_t unit);
    // Puts an absent unit into an empty slot; the policy is the caller's to tell.
    void assign(Slot& slot, uint32_t unit);
    // Empties an idle slot that nobody has pinned; tells the policy. It is not among the
    // free ones after that: the caller assigns it or puts it back.
    void evict(Slot& slot);
    void put_back(Slot& slot);

    uint32_t count() const { return static_cast<uint32_t>(slots_.size()); }
    uint32_t used() const { return used_; }
    uint64_t peak_bytes() const { return peak_bytes_; }

  private:
    const std::vector<UnitSpec>& units_;
    const Layout layout_;
    const uint64_t block_;
    const uint32_t piece_;
    std::deque<Slot> slots_;
    std::vector<Slot*> slot_of_;                    // by unit
    std::vector<std::vector<Slot*>> free_;          // by class; the back is taken first
    std::vector<std::unique_ptr<Policy>> policies_; // by class
    std::unique_ptr<std::atomic<uint64_t>[]> bits_; // of all slices
    uint32_t used_ = 0;
    uint64_t used_bytes_ = 0;
    uint64_t peak_bytes_ = 0;
};

} // namespace moetuner
