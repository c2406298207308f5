#include <cstring>
#include <doctest/doctest.h>
#include <random>
#include <vector>

#include "cache/layout.h"
#include "io/log.h"
#include "support.h"

using namespace moetuner;

TEST_CASE("what is read for a slice fits its region, wherever the slice begins") {
    std::mt19937_64 random(1);
    for (const uint64_t block : {4096ULL, 65536ULL}) {
        for (int i = 0; i < 20000; ++i) {
            // Near multiples of the block is where it matters.
            const uint64_t bytes = 1 + (random() % 4) * block + random() % 3 * (block / 2) +
                                   random() % 3 + (random() % 8 == 0 ? block - 2 : 0);
            const Extent slice{0, random() % (1ULL << 33), bytes};
            const auto piece = static_cast<uint32_t>(block * (1 + random() % 4));
            const SliceRead read = slice_read(slice, block, piece);
            REQUIRE(read.offset % block == 0);
            REQUIRE(read.bytes % block == 0);
            REQUIRE(read.offset + read.lead == slice.offset);
            REQUIRE(read.lead < block);
            REQUIRE(read.bytes <= region_bytes(bytes, block));
            REQUIRE(read.lead + bytes <= read.bytes);

            uint64_t end = 0; // pieces cover the read without gap or overlap
            for (uint32_t k = 0; k < read.pieces; ++k) {
                const PieceRead part = piece_read(slice, read, piece, k);
                REQUIRE(part.begin == end);
                REQUIRE(part.length > 0);
                REQUIRE(part.length <= piece);
                REQUIRE(part.length % block == 0);
                REQUIRE(part.needed > 0);
                REQUIRE(part.needed <= part.length);
                REQUIRE((k + 1 == read.pieces || part.needed == part.length));
                end += part.length;
            }
            REQUIRE(end == read.bytes);
            REQUIRE(bytes_in_pieces(slice, read, piece, read.pieces) == bytes);
            REQUIRE(bytes_in_pieces(slice, read, piece, 0) == 0);
        }
    }
}

TEST_CASE("the slice of gpt-oss-20b, whose region of slice + block was too small") {
    constexpr uint64_t bytes = 4406400;
    constexpr uint64_t block = 4096;
    // 4,406,400 is 1075 blocks and 3200 bytes: begun 1152 bytes past a block it touches 1077
    // blocks, and slice + block ends 896 bytes before the last of them does.
    const SliceRead read = slice_read({0, 1152, bytes}, block, 131072);
    CHECK(read.bytes == 1077 * block);
    CHECK(read.bytes > bytes + block);
    CHECK(read.bytes <= region_bytes(bytes, block));
}

TEST_CASE("bytes in pieces grow with the pieces, and the lead is not among them") {
    const Extent slice{0, 4096 + 100, 3 * 4096};
    const SliceRead read = slice_read(slice, 4096, 4096);
    CHECK(read.pieces == 4);
    CHECK(bytes_in_pieces(slice, read, 4096, 1) == 4096 - 100);
    CHECK(bytes_in_pieces(slice, read, 4096, 2) == 2 * 4096 - 100);
    CHECK(bytes_in_pieces(slice, read, 4096, 4) == 3 * 4096);
}

namespace {

std::vector<UnitSpec> units_of(const std::vector<std::pair<uint64_t, uint32_t>>& sizes) {
    std::vector<UnitSpec> units;
    for (const auto& [bytes, count] : sizes) {
        for (uint32_t i = 0; i < count; ++i) {
            units.push_back({{{0, 0, bytes}, {0, 0, bytes}}, 0});
        }
    }
    return units;
}

} // namespace

TEST_CASE("the budget is never exceeded, and what is left is less than any missing slot") {
    std::mt19937_64 random(2);
    for (int i = 0; i < 300; ++i) {
        std::vector<std::pair<uint64_t, uint32_t>> sizes;
        for (uint64_t c = 1 + random() % 4; c > 0; --c) {
            sizes.emplace_back(1 + random() % 100000, 1 + static_cast<uint32_t>(random() % 60));
        }
        const auto units = units_of(sizes);
        uint64_t all = 0;
        for (const UnitSpec& unit : units) {
            all += slot_bytes(unit, 4096);
        }
        const uint64_t budget = random() % (all + all / 4);
        Layout layout;
        try {
            layout = plan_layout(units, budget, 4096, 131072);
        } catch (const Error&) {
            REQUIRE(budget < 4 * (2 * (100000 + 2 * 4096)));
            continue;
        }
        REQUIRE(layout.bytes <= budget);
        uint64_t sum = 0;
        for (const SizeClass& size : layout.classes) {
            REQUIRE(size.slots >= 1);
            REQUIRE(size.slots <= size.units);
            REQUIRE(size.offset == sum);
            REQUIRE((size.slots == size.units || budget - layout.bytes < size.slot_bytes));
            sum += size.slots * size.slot_bytes;
        }
        REQUIRE(sum == layout.bytes);
    }
}

TEST_CASE("classes get the same share of their units") {
    const auto units = units_of({{400000, 100}, {600000, 300}});
    const Layout layout = plan_layout(
        units, 100 * slot_bytes(units[0], 4096) + 100 * slot_bytes(units[399], 4096), 4096, 131072);
    REQUIRE(layout.classes.size() == 2);
    CHECK(layout.classes[0].units == 300); // larger slots first
    const double large = layout.classes[0].slots / 300.0;
    const double small = layout.classes[1].slots / 100.0;
    CHECK(large == doctest::Approx(small).epsilon(0.03));
}

TEST_CASE("units of the same slot size share a class, whatever their slices") {
    std::vector<UnitSpec> units{{{{0, 0, 4096}, {0, 0, 8192}}, 0},
                                {{{0, 0, 8192}, {0, 0, 4096}}, 0}};
    const Layout layout = plan_layout(units, 1 << 20, 4096, 4096);
    CHECK(layout.classes.size() == 1);
    CHECK(layout.bytes == 2 * (2 * 4096 + 3 * 4096)); // not more slots than units
}

TEST_CASE("a budget below one slot of each size is refused, with what would do") {
    const auto units = units_of({{400000, 10}, {600000, 10}});
    const uint64_t least = slot_bytes(units[0], 4096) + slot_bytes(units[19], 4096);
    CHECK_NOTHROW(plan_layout(units, least, 4096, 131072));
    CHECK_THROWS_WITH_AS(plan_layout(units, least - 1, 4096, 131072),
                         doctest::Contains(std::to_string(least).c_str()), Error);
}
