// Who gets a slot.
#include <algorithm>
#include <utility>

#include "cache/impl.h"

namespace moetuner {

Acquisition Cache::Impl::acquire(Cache& cache, const uint32_t* units, size_t n, Slices slices,
                                 bool may_block) {
    Acquisition acquisition;
    if (n == 0) {
        return acquisition;
    }
    acquisition.cache_ = &cache;
    {
        std::unique_lock<std::mutex> lock(mutex_);
        if (may_block) {
            const uint64_t ticket = next_ticket_++;
            bool first = true;
            room_.wait(lock, [&] {
                const bool got = ticket == serving_ && pin(acquisition, units, n, slices);
                stats_.blocked += first && !got ? 1 : 0;
                first = false;
                return got;
            });
            ++serving_;
            if (someone_waits_for_room()) {
                room_.notify_all();
            }
        } else if (someone_waits_for_room() || !pin(acquisition, units, n, slices)) {
            acquisition.rest_.resize(n);
            for (size_t k = 0; k < n; ++k) {
                acquisition.rest_[k] = static_cast<uint32_t>(k);
            }
            return acquisition;
        }
    }
    reader_->kick();
    return acquisition;
}

// False, and nothing changed, if there is no slot for any of the units.
bool Cache::Impl::pin(Acquisition& acquisition, const uint32_t* units, size_t n, Slices slices) {
    std::vector<Slot*> got(n, nullptr);
    size_t pinned = 0;
    // What is there is pinned first, or it could be the victim of what is missing.
    for (size_t k = 0; k < n; ++k) {
        if (Slot* slot = slots_.find(units[k])) {
            ++slot->pins;
            slots_.policy_of(units[k]).touch(units[k]);
            got[k] = slot;
            ++pinned;
        }
    }
    for (size_t k = 0; k < n; ++k) {
        if (got[k] != nullptr) {
            continue;
        }
        Slot* slot = slots_.find(units[k]); // a unit may be listed twice
        if (slot == nullptr) {
            slot = bring_in(units[k], 0, true);
        }
        if (slot == nullptr) {
            acquisition.rest_.push_back(static_cast<uint32_t>(k));
            continue;
        }
        ++slot->pins;
        got[k] = slot;
        ++pinned;
    }
    if (pinned == 0) {
        acquisition.rest_.clear();
        for (size_t k = 0; k < n; ++k) {
            abandon_speculation(units[k]);
        }
        return false;
    }
    acquisition.sequence_ = ++sequence_;
    acquisition.running_ = slices.first;
    acquisition.entries_.reserve(pinned);
    for (size_t k = 0; k < n; ++k) {
        if (got[k] != nullptr) {
            acquisition.entries_.push_back({got[k], units[k], static_cast<uint32_t>(k)});
        }
    }
    stats_.rounds += acquisition.rest_.empty() ? 0 : 1;
    ++acquisitions_;
    ask_for(acquisition, slices);
    return true;
}

void Cache::Impl::ask_for(Acquisition& acquisition, Slices slices) {
    for (const Acquisition::Entry& entry : acquisition.entries_) {
        Slot& slot = *entry.slot;
        bool all_there = true;
        bool missed = false;
        for (uint32_t s = slices.first; s < std::min<uint32_t>(slices.end, slot.slice_count); ++s) {
            const ReadKey key{s - slices.first, acquisition.sequence_, entry.position, slot.number,
                              s};
            const Got got = request(slot, s, key, 1);
            all_there = all_there && got == Got::there;
            missed = missed || got == Got::queued;
        }
        LayerStats& layer = layer_of(entry.unit);
        ++(missed ? layer.misses : all_there ? layer.hits : layer.joined);
        stats_.prefetch_used += slot.speculative ? 1 : 0;
        slot.speculative = false;
        slot.last_used = acquisitions_;
    }
}

// A slot with the (absent) unit in it, or null.
Slot* Cache::Impl::bring_in(uint32_t unit, uint64_t min_age, bool drop_queued) {
    Slot* slot = make_room(unit, min_age, drop_queued);
    if (slot != nullptr) {
        slots_.assign(*slot, unit);
        slots_.policy_of(unit).insert(unit);
        slot->last_used = acquisitions_;
    }
    return slot;
}

// An empty slot for the unit: a free one, else the policy's victim among those that nobody
// has pinned, with no read under way (it would go on writing) and, unless `drop_queued`,
// none queued; unused for `min_age` acquisitions.
Slot* Cache::Impl::make_room(uint32_t unit, uint64_t min_age, bool drop_queued) {
    if (Slot* slot = slots_.take_free(unit)) {
        return slot;
    }
    const auto victim = slots_.policy_of(unit).victim([&](uint32_t candidate) {
        const Slot& slot = *slots_.find(candidate);
        return slot.pins == 0 && acquisitions_ - slot.last_used >= min_age &&
               (drop_queued ? slot.idle_but_queued() : slot.idle());
    });
    if (!victim) {
        return nullptr;
    }
    Slot& slot = *slots_.find(*victim);
    abandon(slot);
    ++layer_of(*victim).evictions;
    stats_.prefetch_dropped += slot.speculative ? 1 : 0;
    errors_.erase(errors_.lower_bound({slot.number, 0}), errors_.lower_bound({slot.number + 1, 0}));
    slots_.evict(slot);
    return &slot;
}

// Asks for one slice of a unit in a slot; `key`: where its reads go if they must be queued;
// `own_pins`: how many of the slot's pins are the caller's.
Cache::Impl::Got Cache::Impl::request(Slot& slot, uint32_t s, const ReadKey& key,
                                      uint32_t own_pins) {
    SlotSlice& slice = slot.slices[s];
    if (slice.state.ready()) {
        return Got::there;
    }
    if (slice.state.failed()) {
        if (slot.pins > own_pins || !slice.state.idle()) {
            return Got::coming; // others look at the failure now
        }
        slice.state.clear();
        slice.next = 0;
        errors_.erase({slot.number, s});
    }
    if (slice.state.absent()) {
        slice.state.begin(slice.read.pieces - slice.next);
        enqueue(slice, key);
        return Got::queued;
    }
    if (slice.queued && key < slice.key) {
        dequeue(slice);
        enqueue(slice, key);
    }
    return Got::coming;
}

void Cache::Impl::enqueue(SlotSlice& slice, const ReadKey& key) {
    slice.key = key;
    slice.queued = true;
    queue_.insert(key);
    stats_.queued_high = std::max(stats_.queued_high, static_cast<uint32_t>(queue_.size()));
}

void Cache::Impl::dequeue(SlotSlice& slice) {
    queue_.erase(slice.key);
    slice.queued = false;
}

// Takes back what no reader has seen yet of a slot that nobody has pinned.
void Cache::Impl::abandon(Slot& slot) {
    for (uint32_t s = 0; s < slot.slice_count; ++s) {
        SlotSlice& slice = slot.slices[s];
        if (slice.queued) {
            dequeue(slice);
            slice.state.abandon(slice.read.pieces - slice.next);
        }
    }
}

// So that slots of the unit's class which are being read for nobody soon come to rest.
void Cache::Impl::abandon_speculation(uint32_t unit) {
    for (const uint32_t present : slots_.policy_of(unit).order()) {
        Slot& slot = *slots_.find(present);
        if (slot.pins == 0) {
            abandon(slot);
        }
    }
}

void Cache::Impl::release(Acquisition& acquisition) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const Acquisition::Entry& entry : acquisition.entries_) {
            Slot& slot = *entry.slot;
            if (--slot.pins > 0) {
                continue;
            }
            for (uint32_t s = 0; s < slot.slice_count; ++s) {
                SlotSlice& slice = slot.slices[s];
                if (slice.queued && slice.key.stage < background_stage) {
                    ReadKey key = slice.key;
                    key.stage = background_stage;
                    dequeue(slice);
                    enqueue(slice, key);
                }
            }
        }
        if (someone_waits_for_room()) {
            room_.notify_all();
        }
    }
    acquisition.entries_.clear();
    acquisition.rest_.clear();
    acquisition.cache_ = nullptr;
}

size_t Cache::Impl::prefetch(const uint32_t* units, size_t n, Slices slices) {
    size_t there = 0;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        ++sequence_;
        for (size_t k = 0; k < n; ++k) {
            Slot* slot = slots_.find(units[k]);
            const bool present = slot != nullptr;
            if (present) {
                slots_.policy_of(units[k]).touch(units[k]);
            } else {
                slot = bring_in(units[k], std::max(1U, options_.prefetch_min_age), false);
            }
            if (slot == nullptr) {
                continue;
            }
            ++there;
            bool queued = false;
            const uint32_t end = std::min<uint32_t>(slices.end, slot->slice_count);
            for (uint32_t s = slices.first; s < end; ++s) {
                // Slice by slice within one call, call after call.
                const auto place = static_cast<uint32_t>((s - slices.first) * n + k);
                const ReadKey key{background_stage, sequence_, place, slot->number, s};
                queued = request(*slot, s, key, 0) == Got::queued || queued;
            }
            slot->speculative = slot->speculative || !present;
            stats_.prefetched += queued ? 1 : 0;
        }
    }
    reader_->kick();
    return there;
}

size_t Cache::Impl::warm(const std::vector<uint32_t>& hottest_first) {
    std::vector<Slot*> slots;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        ++sequence_;
        for (const uint32_t unit : hottest_first) {
            if (unit >= units_.size() || slots_.find(unit) != nullptr) {
                continue;
            }
            if (Slot* slot = slots_.take_free(unit)) {
                slots_.assign(*slot, unit);
                slot->speculative = true;
                slot->last_used = acquisitions_;
                slots.push_back(slot);
            }
        }
        for (size_t k = slots.size(); k-- > 0;) { // the hottest is the last to be evicted
            slots_.policy_of(slots[k]->unit).insert(slots[k]->unit);
        }
        for (size_t k = 0; k < slots.size(); ++k) {
            for (uint32_t s = 0; s < slots[k]->slice_count; ++s) {
                const auto place = static_cast<uint32_t>(k);
                request(*slots[k], s, {background_stage, sequence_, place, slots[k]->number, s}, 0);
            }
        }
        stats_.prefetched += slots.size();
    }
    reader_->kick();
    return slots.size();
}

std::vector<uint32_t> Cache::Impl::hot() {
    const std::lock_guard<std::mutex> lock(mutex_);
    // Classes have policies of their own: a unit's rank in its class, as a share of the
    // class, is what can be compared.
    std::vector<std::pair<double, uint32_t>> ranked;
    for (uint32_t c = 0; c < layout_.classes.size(); ++c) {
        const std::vector<uint32_t> order = slots_.policy(c).order();
        for (size_t k = 0; k < order.size(); ++k) {
            const auto colder = static_cast<double>(order.size() - k);
            ranked.emplace_back(colder / static_cast<double>(order.size()), order[k]);
        }
    }
    std::sort(ranked.begin(), ranked.end());
    std::vector<uint32_t> units;
    units.reserve(ranked.size());
    for (const auto& [rank, unit] : ranked) {
        units.push_back(unit);
    }
    return units;
}

} // namespace moetuner
