// What an acquisition gets, in what order it is read, and who has to go.
#include <algorithm>
#include <doctest/doctest.h>
#include <map>
#include <numeric>
#include <vector>

#include "cache/cache.h"
#include "cache/layout.h"
#include "support.h"

using namespace support;

namespace {

constexpr uint32_t piece = 16384;
const std::vector<uint64_t> odd_slices{50000, 50000, 61441};

CacheOptions options_of(uint64_t budget) {
    CacheOptions options;
    options.budget = budget;
    options.piece = piece;
    return options;
}

std::vector<uint32_t> range(uint32_t first, uint32_t count) {
    std::vector<uint32_t> list(count);
    std::iota(list.begin(), list.end(), first);
    return list;
}

// Which (unit, slice) each attempt belongs to, each named once, in order.
std::vector<std::pair<uint32_t, unsigned>> sequence(const Rig& rig,
                                                    const std::vector<Attempt>& attempts) {
    std::vector<std::pair<uint32_t, unsigned>> order;
    for (const Attempt& attempt : attempts) {
        for (uint32_t u = 0; u < rig.model.units.size(); ++u) {
            for (unsigned s = 0; s < rig.model.units[u].slices.size(); ++s) {
                const Extent& slice = rig.model.units[u].slices[s];
                const SliceRead read = slice_read(slice, rig.files.block(), piece);
                const std::pair<uint32_t, unsigned> name{u, s};
                // Neighbours share a block: the length tells a last piece from a first one.
                for (uint32_t k = 0; k < read.pieces; ++k) {
                    const PieceRead part = piece_read(slice, read, piece, k);
                    if (attempt.offset == read.offset + part.begin &&
                        attempt.length == part.length &&
                        std::find(order.begin(), order.end(), name) == order.end()) {
                        order.push_back(name);
                    }
                }
            }
        }
    }
    return order;
}

struct Manual {
    Manual(Rig& rig, const CacheOptions& options, unsigned depth = 256) {
        auto owned = std::make_unique<ManualReader>(depth);
        reader = owned.get();
        cache = rig.cache(std::move(owned), options);
    }
    ManualReader* reader = nullptr;
    std::unique_ptr<Cache> cache;
};

using Named = std::vector<std::pair<uint32_t, unsigned>>;

} // namespace

TEST_CASE("every reader brings the file's bytes, at the file's alignment") {
    for (const ReaderCase& way : readers()) {
        CAPTURE(way.name);
        for (const bool direct : {true, false}) {
            CAPTURE(direct);
            Rig rig(make_model(3, 8, odd_slices), direct);
            const auto cache =
                rig.cache(way.make(rig.files, rig.said.log()), options_of(rig.budget(6)));
            for (uint32_t first = 0; first < 24; first += 6) {
                const auto units = range(first, 6);
                Acquisition got = cache->acquire(units.data(), units.size());
                REQUIRE(got.size() == 6);
                for (unsigned s = 0; s < 3; ++s) {
                    for (size_t i = 0; i < got.size(); ++i) {
                        const void* data = got.wait(i, s);
                        REQUIRE(data != nullptr);
                        CHECK(got.ready(i, s));
                        CHECK(got.unit(i) == units[i]);
                        CHECK(rig.right(units[i], s, data));
                        const uint64_t offset = rig.model.units[units[i]].slices[s].offset;
                        CHECK(reinterpret_cast<uintptr_t>(data) % 4096 == offset % 4096);
                    }
                }
                // All slots are full: a read that overran its region would have hurt one.
                for (unsigned s = 0; s < 3; ++s) {
                    for (size_t i = 0; i < got.size(); ++i) {
                        CHECK(rig.right(units[i], s, got.data(i, s)));
                    }
                }
            }
            const CacheStats stats = cache->stats();
            CHECK(stats.total.misses == 24);
            CHECK(stats.total.evictions == 18);
            CHECK(stats.in_flight == 0);
            CHECK((stats.buffered == 0) == rig.files.direct(0));
            CHECK(rig.said.count(LogLevel::warning) == 0);
        }
    }
}

TEST_CASE("units that are there are not read again") {
    Rig rig(make_model(1, 8, odd_slices));
    Manual manual(rig, options_of(rig.budget(8)));
    const auto units = range(0, 4);
    Acquisition first = manual.cache->acquire(units.data(), 4);
    CHECK(!first.ready(0, 0));
    manual.reader->complete_all();
    CHECK(first.ready(0, 0));
    manual.cache->release(first);
    CHECK(first.empty());

    const uint32_t again[] = {3, 6, 0};
    Acquisition second = manual.cache->acquire(again, 3);
    CHECK(second.ready(0, 2));
    CHECK(!second.ready(1, 0));
    CHECK(second.ready(2, 0));
    CHECK(sequence(rig, manual.reader->taken()) == Named{{6, 0}, {6, 1}, {6, 2}});
    const LayerStats stats = manual.cache->stats().total;
    CHECK(stats.hits == 2);
    CHECK(stats.misses == 5);
    manual.reader->complete_all();
}

TEST_CASE("pieces come operation by operation, not unit by unit") {
    Rig rig(make_model(1, 8, odd_slices));
    Manual manual(rig, options_of(rig.budget(8)));
    const uint32_t units[] = {5, 2};
    Acquisition got = manual.cache->acquire(units, 2);
    CHECK(sequence(rig, manual.reader->taken()) ==
          Named{{5, 0}, {2, 0}, {5, 1}, {2, 1}, {5, 2}, {2, 2}});
    manual.reader->complete_all();
}

TEST_CASE("only the slices asked for are read, the others when they are wanted") {
    Rig rig(make_model(1, 8, odd_slices));
    Manual manual(rig, options_of(rig.budget(8)));
    const uint32_t units[] = {1, 2};
    Acquisition got = manual.cache->acquire(units, 2, {1, 2});
    CHECK(sequence(rig, manual.reader->taken()) == Named{{1, 1}, {2, 1}});
    manual.reader->complete_all();
    CHECK(got.ready(0, 1));
    CHECK(!got.ready(0, 0));
    CHECK(got.wait(0, 0) == nullptr); // does not wait for what nobody reads
    CHECK(!got.error(0, 0).empty());

    Acquisition rest = manual.cache->acquire(units, 2);
    CHECK(sequence(rig, manual.reader->taken()) == Named{{1, 0}, {2, 0}, {1, 2}, {2, 2}});
    manual.reader->complete_all();
    CHECK(manual.cache->stats().total.misses == 4);
    CHECK(rig.right(1, 0, rest.wait(0, 0)));
}

TEST_CASE("the least recently used unit goes, but never one that the operation itself has") {
    Rig rig(make_model(1, 8, odd_slices));
    Manual manual(rig, options_of(rig.budget(4)));
    const auto fill = range(0, 4); // 0 is the oldest
    Acquisition got = manual.cache->acquire(fill.data(), 4);
    manual.reader->complete_all();
    manual.cache->release(got);

    // 4 and 5 are listed first and need room; 0 is the oldest, yet it is wanted too.
    const uint32_t units[] = {4, 5, 0};
    got = manual.cache->acquire(units, 3);
    CHECK(got.size() == 3);
    CHECK(got.ready(2, 0));
    CHECK(rig.right(0, 0, got.data(2, 0)));
    manual.reader->complete_all();
    manual.cache->release(got);
    auto there = manual.cache->hot();
    std::sort(there.begin(), there.end());
    CHECK(there == std::vector<uint32_t>{0, 3, 4, 5});
}

TEST_CASE("more units than slots: rounds that read every unit once") {
    Rig rig(make_model(1, 16, odd_slices));
    for (const uint64_t slots : {1U, 2U, 3U, 5U, 16U}) {
        CAPTURE(slots);
        const auto cache = rig.cache(pool(rig.files), options_of(rig.budget(slots)));
        CHECK(cache->slots_for(0) == slots);
        const uint32_t warm[] = {9, 11};
        { Acquisition got = cache->acquire(warm, std::min<size_t>(slots, 2)); }
        cache->drain();
        const uint64_t before = cache->stats().reads;

        std::vector<uint32_t> units = range(0, 16);
        std::vector<uint32_t> todo = units;
        std::vector<int> computed(16, 0);
        size_t rounds = 0;
        while (!todo.empty()) {
            Acquisition round = cache->acquire(todo.data(), todo.size());
            REQUIRE(round.size() > 0);
            REQUIRE(round.size() <= slots);
            REQUIRE(round.size() + round.rest().size() == todo.size());
            for (size_t i = 0; i < round.size(); ++i) {
                REQUIRE(round.unit(i) == todo[round.position(i)]);
                for (unsigned s = 0; s < 3; ++s) {
                    REQUIRE(rig.right(round.unit(i), s, round.wait(i, s)));
                }
                ++computed[round.unit(i)];
            }
            std::vector<uint32_t> rest;
            for (const uint32_t position : round.rest()) {
                rest.push_back(todo[position]);
            }
            todo = rest;
            ++rounds;
        }
        CHECK(computed == std::vector<int>(16, 1));
        CHECK(rounds <= (16 + slots - 1) / slots + 1);
        cache->drain();
        uint64_t pieces = 0;
        for (const uint32_t unit : units) {
            for (const Extent& slice : rig.model.units[unit].slices) {
                pieces += slice_read(slice, rig.files.block(), piece).pieces;
            }
        }
        uint64_t there = 0;
        for (size_t k = 0; k < std::min<size_t>(slots, 2); ++k) {
            for (const Extent& slice : rig.model.units[warm[k]].slices) {
                there += slice_read(slice, rig.files.block(), piece).pieces;
            }
        }
        CHECK(cache->stats().reads - before == pieces - there);
    }
}

TEST_CASE("a unit listed twice is read once and pinned twice") {
    Rig rig(make_model(1, 4, odd_slices));
    const auto cache = rig.cache(pool(rig.files), options_of(rig.budget(1)));
    const uint32_t units[] = {2, 2};
    Acquisition got = cache->acquire(units, 2);
    REQUIRE(got.size() == 2);
    CHECK(got.wait(0, 0) == got.wait(1, 0));
    CHECK(rig.right(2, 0, got.data(1, 0)));
    cache->release(got);
    const uint32_t other = 3;
    CHECK(cache->acquire(&other, 1).size() == 1);
}

TEST_CASE("nothing that is pinned or being read is given away") {
    Rig rig(make_model(1, 8, odd_slices));
    Manual manual(rig, options_of(rig.budget(2)), 3);
    const uint32_t a = 0;
    const uint32_t b = 1;
    const uint32_t c = 2;
    Acquisition pinned = manual.cache->acquire(&a, 1);
    manual.reader->complete_all();
    Acquisition left = manual.cache->acquire(&b, 1);
    CHECK(!manual.reader->taken().empty());
    manual.cache->release(left); // three pieces of b are under way, the rest is queued
    const auto under_way = manual.reader->taken();
    CHECK(under_way.size() == 3);

    Acquisition none = manual.cache->try_acquire(&c, 1);
    CHECK(none.empty());
    CHECK(none.rest() == std::vector<uint32_t>{0});
    CHECK(manual.reader->taken().size() == 3); // the queued rest of b was dropped
    manual.reader->complete(0);
    manual.reader->complete(0);
    CHECK(manual.cache->try_acquire(&c, 1).empty());
    manual.reader->complete(0);
    CHECK(manual.reader->taken().empty());
    Acquisition got = manual.cache->try_acquire(&c, 1);
    CHECK(got.size() == 1);
    CHECK(rig.right(0, 1, pinned.data(0, 1)));
    manual.reader->complete_all();
    CHECK(rig.right(0, 1, pinned.data(0, 1)));
    CHECK(rig.right(2, 2, got.wait(0, 2)));
}

TEST_CASE("a unit whose rest was dropped is completed when it is wanted again") {
    Rig rig(make_model(1, 8, odd_slices));
    Manual manual(rig, options_of(rig.budget(1)), 3);
    const uint32_t a = 0;
    const uint32_t b = 1;
    { Acquisition left = manual.cache->acquire(&a, 1); }
    CHECK(manual.cache->try_acquire(&b, 1).empty()); // drops what was queued
    SUBCASE("while its first pieces are under way") {}
    SUBCASE("after they have come") {
        while (!manual.reader->taken().empty()) {
            manual.reader->complete(0);
        }
    }
    Acquisition got = manual.cache->acquire(&a, 1);
    CHECK(!got.ready(0, 0));
    manual.reader->complete_all();
    for (unsigned s = 0; s < 3; ++s) {
        CHECK(got.ready(0, s));
        CHECK(rig.right(0, s, got.data(0, s)));
    }
    uint64_t pieces = 0;
    for (const Extent& slice : rig.model.units[0].slices) {
        pieces += slice_read(slice, rig.files.block(), piece).pieces;
    }
    CHECK(manual.cache->stats().reads == pieces); // no piece was read twice
}

TEST_CASE("the operation that runs now goes before later ones of another context") {
    Rig rig(make_model(1, 8, odd_slices));
    Manual manual(rig, options_of(rig.budget(8)), 1);
    const uint32_t a = 0;
    const uint32_t b = 1;
    Acquisition first = manual.cache->acquire(&a, 1);
    Acquisition second = manual.cache->acquire(&b, 1);
    Named order;
    while (!manual.reader->taken().empty()) {
        const auto now = sequence(rig, manual.reader->taken());
        if (order.empty() || order.back() != now[0]) {
            order.push_back(now[0]);
        }
        manual.reader->complete(0);
    }
    CHECK(order == Named{{0, 0}, {1, 0}, {0, 1}, {1, 1}, {0, 2}, {1, 2}});
}

TEST_CASE("arrived bytes grow with the leading pieces") {
    Rig rig(make_model(1, 4, {100000, 30000}));
    Manual manual(rig, options_of(rig.budget(4)));
    const uint32_t unit = 1;
    Acquisition got = manual.cache->acquire(&unit, 1);
    const uint64_t lead = rig.model.units[1].slices[0].offset % rig.files.block();
    CHECK(got.arrived(0, 0) == 0);
    manual.reader->complete(1); // the second piece first
    CHECK(got.arrived(0, 0) == 0);
    manual.reader->complete(0);
    CHECK(got.arrived(0, 0) == 2 * piece - lead);
    CHECK(got.wait_arrived(0, 0, 1000) == 2 * piece - lead);
    CHECK(wrong_bytes(got.data(0, 0), rig_seed, rig.model.units[1].slices[0].offset,
                      2 * piece - lead) == 0);
    manual.reader->complete_all();
    CHECK(got.wait_arrived(0, 0, ~0ULL) == 100000);
    CHECK(got.arrived(0, 1) == 30000);
}

TEST_CASE("statistics are kept by layer") {
    Rig rig(make_model(3, 4, odd_slices));
    const auto cache = rig.cache(pool(rig.files), options_of(rig.budget(12)));
    for (int pass = 0; pass < 2; ++pass) {
        for (uint32_t layer = 0; layer < 3; ++layer) {
            const auto units = range(layer * 4, layer + 1);
            Acquisition got = cache->acquire(units.data(), units.size());
            for (size_t i = 0; i < got.size(); ++i) {
                for (unsigned s = 0; s < 3; ++s) {
                    REQUIRE(got.wait(i, s) != nullptr);
                }
            }
        }
    }
    cache->drain();
    const auto layers = cache->layer_stats();
    REQUIRE(layers.size() == 3);
    uint64_t bytes = 0;
    for (uint32_t layer = 0; layer < 3; ++layer) {
        CHECK(layers[layer].misses == layer + 1);
        CHECK(layers[layer].hits == layer + 1);
        CHECK(layers[layer].bytes >= (layer + 1) * (50000 + 50000 + 61441));
        bytes += layers[layer].bytes;
    }
    const CacheStats stats = cache->stats();
    CHECK(stats.total.bytes == bytes);
    CHECK(std::accumulate(stats.latency.begin(), stats.latency.end(), uint64_t{0}) == stats.reads);
    CHECK(stats.in_flight_high >= 1);
    CHECK(stats.queued == 0);
    const CacheShape shape = cache->shape();
    CHECK(shape.arena_bytes <= shape.budget);
    CHECK(shape.peak_bytes <= shape.arena_bytes);
    CHECK(shape.used_slots == 6);
}

TEST_CASE("what cannot be a cache is refused with a reason") {
    Rig rig(make_model(1, 4, odd_slices));
    const auto make = [&](std::vector<UnitSpec> units, uint64_t budget) {
        return Cache(std::move(units), options_of(budget), rig.files, pool(rig.files), Log());
    };
    CHECK_THROWS_WITH_AS(make({}, 1 << 20), doctest::Contains("no expert"), Error);
    CHECK_THROWS_WITH_AS(make(rig.model.units, 4096), doctest::Contains("cannot hold"), Error);
    auto past = rig.model.units;
    past[3].slices[2].offset += 97; // the file ends with 96 bytes of something else
    CHECK_THROWS_WITH_AS(make(past, 1 << 20), doctest::Contains("model.gguf"), Error);
    past[3].slices[2].offset = ~0ULL - 5;
    CHECK_THROWS_AS(make(past, 1 << 20), Error);
    past = rig.model.units;
    past[0].slices[0].bytes = 0;
    CHECK_THROWS_AS(make(past, 1 << 20), Error);
    past[0].slices.clear();
    CHECK_THROWS_AS(make(past, 1 << 20), Error);
    past = rig.model.units;
    past[0].slices[0].file = 1;
    CHECK_THROWS_AS(make(past, 1 << 20), Error);
}
