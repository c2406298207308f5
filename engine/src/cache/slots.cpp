#include "cache/slots.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace moetuner {

bool ReadKey::operator<(const ReadKey& other) const {
    return std::tie(stage, sequence, place, slot, slice) <
           std::tie(other.stage, other.sequence, other.place, other.slot, other.slice);
}

bool Slot::idle() const {
    return std::all_of(slices.begin(), slices.end(),
                       [](const SlotSlice& slice) { return slice.state.idle(); });
}

bool Slot::idle_but_queued() const {
    return std::all_of(slices.begin(), slices.end(), [](const SlotSlice& slice) {
        return slice.state.outstanding() == (slice.queued ? slice.read.pieces - slice.next : 0);
    });
}

SlotTable::SlotTable(const std::vector<UnitSpec>& units, Layout layout, std::byte* arena,
                     uint64_t block, uint32_t piece, const PolicyFactory& policy)
    : units_(units), layout_(std::move(layout)), block_(block), piece_(piece), slot_of_(units.size()) {
    size_t words = 0;
    for (const SizeClass& size : layout_.classes) {
        words += size_t{size.slots} * size.slices * ((size.slice_pieces + 63) / 64);
    }
    bits_ = std::make_unique<std::atomic<uint64_t>[]>(words);

    std::atomic<uint64_t>* bits = bits_.get();
    for (const SizeClass& size : layout_.classes) {
        policies_.push_back(policy(static_cast<uint32_t>(units.size())));
        std::vector<Slot*>& free = free_.emplace_back();
        for (uint32_t i = 0; i < size.slots; ++i) {
            Slot& slot = slots_.emplace_back();
            slot.number = count() - 1;
            slot.base = arena + size.offset + i * size.slot_bytes;
            for (uint32_t s = 0; s < size.slices; ++s) {
                const uint32_t slice_words = (size.slice_pieces + 63) / 64;
                slot.slices.emplace_back().state.attach(bits, slice_words);
                bits += slice_words;
            }
            free.push_back(&slot);
        }
        std::reverse(free.begin(), free.end());
    }
}

Slot* SlotTable::take_free(uint32_t unit) {
    std::vector<Slot*>& free = free_[layout_.class_of[unit]];
    if (free.empty()) {
        return nullptr;
    }
    Slot* slot = free.back();
    free.pop_back();
    return slot;
}

void SlotTable::assign(Slot& slot, uint32_t unit) {
    const std::vector<Extent>& slices = units_[unit].slices;
    slot.unit = unit;
    slot.speculative = false;
    slot.slice_count = static_cast<uint32_t>(slices.size());
    std::byte* region = slot.base;
    for (uint32_t s = 0; s < slot.slice_count; ++s) {
        SlotSlice& slice = slot.slices[s];
        slice.region = region;
        slice.extent = slices[s];
        slice.read = slice_read(slices[s], block_, piece_);
        region += region_bytes(slices[s].bytes, block_);
    }
    slot_of_[unit] = &slot;
    ++used_;
    used_bytes_ += layout_.classes[layout_.class_of[unit]].slot_bytes;
    peak_bytes_ = std::max(peak_bytes_, used_bytes_);
}

void SlotTable::evict(Slot& slot) {
    --used_;
    used_bytes_ -= layout_.classes[layout_.class_of[slot.unit]].slot_bytes;
    policy_of(slot.unit).erase(slot.unit);
    slot_of_[slot.unit] = nullptr;
    for (SlotSlice& slice : slot.slices) {
        slice.state.clear();
        slice.next = 0;
    }
    // The unit stays written there until assign(): put_back needs its class.
}

void SlotTable::put_back(Slot& slot) {
    free_[layout_.class_of[slot.unit]].push_back(&slot);
    slot.unit = no_unit;
}

} // namespace moetuner
