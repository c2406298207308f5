#include "cache/layout.h"

#include <algorithm>
#include <functional>
#include <map>
#include <string>

#include "io/log.h"

namespace moetuner {

uint64_t slot_bytes(const UnitSpec& unit, uint64_t block) {
    uint64_t sum = 0;
    for (const Extent& slice : unit.slices) {
        sum += region_bytes(slice.bytes, block);
    }
    return sum;
}

SliceRead slice_read(const Extent& slice, uint64_t block, uint32_t piece) {
    SliceRead read{};
    read.offset = round_down(slice.offset, block);
    read.lead = slice.offset - read.offset;
    read.bytes = round_up(read.lead + slice.bytes, block);
    read.pieces = static_cast<uint32_t>((read.bytes + piece - 1) / piece);
    return read;
}

PieceRead piece_read(const Extent& slice, const SliceRead& read, uint32_t piece, uint32_t index) {
    PieceRead part{};
    part.begin = uint64_t{index} * piece;
    part.length = static_cast<uint32_t>(std::min<uint64_t>(piece, read.bytes - part.begin));
    part.needed = static_cast<uint32_t>(
        std::min<uint64_t>(part.length, read.lead + slice.bytes - part.begin));
    return part;
}

uint64_t bytes_in_pieces(const Extent& slice, const SliceRead& read, uint32_t piece,
                         uint32_t pieces) {
    const uint64_t end = uint64_t{pieces} * piece;
    return end <= read.lead ? 0 : std::min(end - read.lead, slice.bytes);
}

namespace {

// The classes without their slots.
Layout classify(const std::vector<UnitSpec>& units, uint64_t block, uint32_t piece) {
    std::map<uint64_t, SizeClass, std::greater<>> by_size;
    for (const UnitSpec& unit : units) {
        SizeClass& size = by_size[slot_bytes(unit, block)];
        ++size.units;
        size.slices = std::max(size.slices, static_cast<uint32_t>(unit.slices.size()));
        for (const Extent& slice : unit.slices) {
            size.slice_pieces = std::max(size.slice_pieces, slice_read(slice, block, piece).pieces);
        }
    }
    Layout layout;
    std::map<uint64_t, uint32_t> number;
    for (auto& [bytes, size] : by_size) {
        size.slot_bytes = bytes;
        number[bytes] = static_cast<uint32_t>(layout.classes.size());
        layout.classes.push_back(size);
    }
    for (const UnitSpec& unit : units) {
        layout.class_of.push_back(number[slot_bytes(unit, block)]);
    }
    return layout;
}

// The class with the smallest share of its units that still has units without a slot and
// whose slot costs at most `left`.
SizeClass* neediest(std::vector<SizeClass>& classes, uint64_t left) {
    SizeClass* found = nullptr;
    for (SizeClass& size : classes) {
        if (size.slots == size.units || size.slot_bytes > left) {
            continue;
        }
        if (found == nullptr ||
            uint64_t{size.slots} * found->units < uint64_t{found->slots} * size.units) {
            found = &size;
        }
    }
    return found;
}

} // namespace

Layout plan_layout(const std::vector<UnitSpec>& units, uint64_t budget, uint64_t block,
                   uint32_t piece) {
    Layout layout = classify(units, block, piece);
    uint64_t least = 0;
    for (SizeClass& size : layout.classes) {
        size.slots = 1;
        least += size.slot_bytes;
    }
    if (least > budget) {
        throw Error("a budget of " + std::to_string(budget) +
                    " bytes cannot hold one expert of each size: it takes " +
                    std::to_string(least));
    }
    uint64_t left = budget - least;
    while (SizeClass* size = neediest(layout.classes, left)) {
        ++size->slots;
        left -= size->slot_bytes;
    }
    for (SizeClass& size : layout.classes) {
        size.offset = layout.bytes;
        layout.bytes += size.slot_bytes * size.slots;
    }
    return layout;
}

} // namespace moetuner
