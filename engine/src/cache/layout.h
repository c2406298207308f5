// Where bytes go: slots, size classes, pieces. Arithmetic only.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/unit.h"
#include "io/files.h"

namespace moetuner {

constexpr uint64_t round_down(uint64_t value, uint64_t block) { return value / block * block; }
constexpr uint64_t round_up(uint64_t value, uint64_t block) {
    return round_down(value + block - 1, block);
}

// Room for one slice in a slot. A direct read begins at the block boundary below the slice
// and ends at the one above its end: together up to one block more than the slice rounded
// up. (The slice plus one block is too little: the last block of an unaligned slice whose
// size is no multiple would land in the neighbour.)
constexpr uint64_t region_bytes(uint64_t slice_bytes, uint64_t block) {
    return round_up(slice_bytes, block) + block;
}

uint64_t slot_bytes(const UnitSpec& unit, uint64_t block);

// What is read of a file for one slice, and where the slice is in it.
struct SliceRead {
    uint64_t offset; // in the file, multiple of the block
    uint64_t bytes;  // multiple of the block, at most region_bytes
    uint64_t lead;   // of the slice's first byte
    uint32_t pieces; // the last may be shorter than the others
};

// `piece`: multiple of the block.
SliceRead slice_read(const Extent& slice, uint64_t block, uint32_t piece);

struct PieceRead {
    uint64_t begin;  // in the slice's region; the same distance into SliceRead::offset
    uint32_t length; // multiple of the block
    uint32_t needed; // up to the slice's last byte
};

PieceRead piece_read(const Extent& slice, const SliceRead& read, uint32_t piece, uint32_t index);

// Bytes of the slice in its first `pieces` pieces.
uint64_t bytes_in_pieces(const Extent& slice, const SliceRead& read, uint32_t piece,
                         uint32_t pieces);

// Units whose slots have the same size.
struct SizeClass {
    uint64_t slot_bytes = 0;
    uint32_t units = 0;
    uint32_t slots = 0;
    uint32_t slices = 0;       // most of any unit
    uint32_t slice_pieces = 0; // most of any slice
    uint64_t offset = 0;       // of its first slot in the arena
};

struct Layout {
    std::vector<SizeClass> classes; // larger slots first
    std::vector<uint32_t> class_of; // by unit
    uint64_t bytes = 0;             // of the arena
};

// Divides the budget so that every class can hold about the same share of its units, at
// least one. Throws Error if it cannot, with what would do.
Layout plan_layout(const std::vector<UnitSpec>& units, uint64_t budget, uint64_t block,
                   uint32_t piece);

} // namespace moetuner
