// Several contexts at the same time: blocking, turns, and a storm that checks every byte.
#include <algorithm>
#include <atomic>
#include <doctest/doctest.h>
#include <random>
#include <thread>
#include <vector>

#include "cache/cache.h"
#include "support.h"

using namespace support;

namespace {

const std::vector<uint64_t> slices{30000, 30000, 45057};

CacheOptions options_of(uint64_t budget) {
    CacheOptions options;
    options.budget = budget;
    options.piece = 16384;
    options.prefetch_min_age = 2;
    return options;
}

std::vector<uint32_t> some_units(std::mt19937& random, uint32_t of, size_t most) {
    std::vector<uint32_t> units(1 + random() % most);
    for (uint32_t& unit : units) {
        // Skewed, as routers are: some experts are hot.
        const uint32_t a = static_cast<uint32_t>(random()) % of;
        const uint32_t b = static_cast<uint32_t>(random()) % of;
        unit = std::min(a, b);
    }
    return units;
}

struct Tally {
    std::atomic<uint64_t> slices{0};
    std::atomic<uint64_t> wrong{0};
    std::atomic<uint64_t> failed{0};
    std::atomic<uint64_t> silent{0}; // failed without an error text
    std::atomic<uint64_t> lost{0};   // units of a request that no round had
};

// What a backend does with one operation after the other: ready ones first, then the rest.
void compute(const Rig& rig, const Acquisition& got, std::mt19937& random, Tally& tally) {
    std::vector<uint32_t> order(got.size());
    for (unsigned s = 0; s < slices.size(); ++s) {
        got.ready_first(s, order.data());
        std::vector<bool> seen(got.size(), false);
        for (const uint32_t i : order) {
            seen[i] = true;
            const uint32_t unit = got.unit(i);
            const Extent& extent = rig.model.units[unit].slices[s];
            if (random() % 4 == 0) {
                const uint64_t wanted = random() % extent.bytes;
                const uint64_t there = got.wait_arrived(i, s, wanted);
                if (there > 0) {
                    tally.wrong += wrong_bytes(got.data(i, s), rig_seed, extent.offset, there);
                }
            }
            const void* data = got.wait(i, s);
            ++tally.slices;
            if (data == nullptr) {
                ++tally.failed;
                tally.silent += got.error(i, s).empty() ? 1 : 0;
            } else if (!rig.right(unit, s, data)) {
                ++tally.wrong;
            }
        }
        tally.lost += static_cast<uint64_t>(std::count(seen.begin(), seen.end(), false));
    }
}

// One context: operations on random experts, in rounds if need be.
void context(const Rig& rig, Cache& cache, uint32_t seed, int operations, Tally& tally) {
    std::mt19937 random(seed);
    const auto count = static_cast<uint32_t>(rig.model.units.size());
    for (int k = 0; k < operations; ++k) {
        std::vector<uint32_t> todo = some_units(random, count, 10);
        if (random() % 3 == 0) {
            const auto ahead = some_units(random, count, 6);
            cache.prefetch(ahead.data(), ahead.size());
        }
        while (!todo.empty()) {
            Acquisition got = cache.acquire(todo.data(), todo.size());
            std::vector<uint32_t> rest;
            for (const uint32_t position : got.rest()) {
                rest.push_back(todo[position]);
            }
            tally.lost += todo.size() - got.size() - rest.size();
            // The next layer while this one computes, as far as there is room.
            Acquisition next;
            if (random() % 4 == 0) {
                const auto units = some_units(random, count, 3);
                next = cache.try_acquire(units.data(), units.size());
            }
            if (random() % 16 == 0) {
                cache.release(got); // gives up: an aborted computation
            }
            compute(rig, got, random, tally);
            compute(rig, next, random, tally);
            todo = rest;
        }
    }
}

void storm(Rig& rig, Cache& cache, unsigned contexts, int operations, Tally& tally) {
    std::atomic<bool> over{false};
    std::thread tuner([&] { // settings change under way, statistics are read
        std::mt19937 random(99);
        while (!over) {
            cache.set_depth(1 + static_cast<unsigned>(random() % 40));
            cache.set_spin(random() % 2 == 0 ? 0 : 20000);
            const CacheStats stats = cache.stats();
            REQUIRE(stats.in_flight <= stats.in_flight_high);
            const CacheShape shape = cache.shape();
            REQUIRE(shape.peak_bytes <= shape.arena_bytes);
            REQUIRE(shape.arena_bytes <= shape.budget);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    });
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < contexts; ++t) {
        threads.emplace_back(
            [&, t] { context(rig, cache, 100 * contexts + t, operations, tally); });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    over = true;
    tuner.join();
    cache.drain();
    const CacheStats stats = cache.stats();
    CHECK(stats.in_flight == 0);
    CHECK(stats.queued == 0);
}

} // namespace

TEST_CASE("storm: every byte is right") {
    for (const ReaderCase& way : readers()) {
        for (const unsigned contexts : {1U, 2U, 4U}) {
            for (const uint64_t slots : {4U, 20U}) {
                CAPTURE(way.name);
                CAPTURE(contexts);
                CAPTURE(slots);
                Rig rig(make_model(3, 16, slices));
                const auto cache =
                    rig.cache(way.make(rig.files, rig.said.log()), options_of(rig.budget(slots)));
                Tally tally;
                storm(rig, *cache, contexts, 120 / static_cast<int>(contexts), tally);
                CHECK(tally.slices > 500);
                CHECK(tally.wrong == 0);
                CHECK(tally.failed == 0);
                CHECK(tally.lost == 0);
            }
        }
    }
}

TEST_CASE("storm with faults: every byte is right, or the slice has failed and says why") {
    for (const ReaderCase& way : readers()) {
        for (const bool failing : {false, true}) {
            CAPTURE(way.name);
            CAPTURE(failing);
            Rig rig(make_model(3, 16, slices));
            Faults faults;
            faults.delay = 50;
            faults.max_delay_us = 2000;
            faults.reorder = 200;
            faults.short_read = 200;
            faults.eintr = 50;
            faults.eagain = 50;
            faults.eio = failing ? 250 : 0;
            faults.einval = failing ? 1 : 0;
            const auto cache =
                rig.cache(make_fault_reader(way.make(rig.files, rig.said.log()), faults),
                          options_of(rig.budget(12)));
            Tally tally;
            storm(rig, *cache, 2, 50, tally);
            CHECK(tally.wrong == 0);
            CHECK(tally.lost == 0);
            CHECK(tally.silent == 0);
            CHECK((tally.failed > 0) == failing);
            CHECK(rig.said.count(LogLevel::warning) <= 1);
        }
    }
}

TEST_CASE("who finds every slot pinned waits for a release, in turn") {
    Rig rig(make_model(1, 8, slices));
    const auto cache = rig.cache(pool(rig.files), options_of(rig.budget(1)));
    const uint32_t first = 0;
    Acquisition held = cache->acquire(&first, 1);
    std::atomic<int> got{0};
    std::vector<std::thread> threads;
    for (uint32_t t = 1; t <= 3; ++t) {
        threads.emplace_back([&, t] {
            const uint32_t unit = t;
            const Acquisition mine = cache->acquire(&unit, 1);
            REQUIRE(mine.size() == 1);
            REQUIRE(rig.right(unit, 0, mine.wait(0, 0)));
            ++got;
        });
    }
    while (cache->stats().blocked == 0) {
        std::this_thread::yield();
    }
    CHECK(got == 0);
    CHECK(cache->try_acquire(&first, 1).empty()); // others came before
    CHECK(rig.right(0, 0, held.wait(0, 0)));
    cache->release(held);
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(got == 3);
}

TEST_CASE("who finds every slot being read for nobody waits for one to come to rest") {
    Rig rig(make_model(1, 8, slices));
    auto owned = std::make_unique<ManualReader>(2);
    ManualReader& reader = *owned;
    const auto cache = rig.cache(std::move(owned), options_of(rig.budget(1)));
    const uint32_t ahead = 3;
    cache->prefetch(&ahead, 1);
    std::thread waiting([&] {
        const uint32_t unit = 4;
        const Acquisition got = cache->acquire(&unit, 1);
        REQUIRE(rig.right(unit, 2, got.wait(0, 2)));
    });
    while (cache->stats().blocked == 0) {
        std::this_thread::yield();
    }
    CHECK(cache->stats().queued == 0); // the rest of the prefetch was dropped
    while (cache->stats().total.misses == 0) {
        if (!reader.taken().empty()) {
            reader.complete(0);
        }
    }
    while (cache->stats().in_flight > 0 || cache->stats().queued > 0) {
        reader.complete_all();
    }
    waiting.join();
}

TEST_CASE("reads survive the thread that submitted them") {
    for (const ReaderCase& way : readers()) {
        CAPTURE(way.name);
        Rig rig(make_model(3, 16, slices));
        const auto cache =
            rig.cache(way.make(rig.files, rig.said.log()), options_of(rig.budget(48)));
        Acquisition got;
        std::thread submitter([&] {
            std::vector<uint32_t> units(48);
            for (uint32_t u = 0; u < 48; ++u) {
                units[u] = u;
            }
            got = cache->acquire(units.data(), units.size());
        });
        submitter.join();
        for (size_t i = 0; i < got.size(); ++i) {
            for (unsigned s = 0; s < 3; ++s) {
                const void* data = got.wait(i, s);
                REQUIRE(data != nullptr);
                CHECK(rig.right(got.unit(i), s, data));
            }
        }
    }
}

TEST_CASE("depth of 1 and of more than there is, changed at run time") {
    for (const ReaderCase& way : readers()) {
        CAPTURE(way.name);
        Rig rig(make_model(1, 8, slices));
        const auto cache =
            rig.cache(way.make(rig.files, rig.said.log()), options_of(rig.budget(8)));
        for (const unsigned depth : {1U, 2U, 0U, 100000U, 8U}) {
            cache->set_depth(depth);
            CHECK(cache->depth() >= 1);
            CHECK(cache->depth() <= 256);
            const uint32_t unit = depth % 8;
            const Acquisition got = cache->acquire(&unit, 1);
            CHECK(rig.right(unit, 0, got.wait(0, 0)));
        }
        CHECK(cache->depth() == 8);
    }
}

TEST_CASE("an acquisition can be moved, and releases itself once") {
    Rig rig(make_model(1, 8, slices));
    const auto cache = rig.cache(pool(rig.files), options_of(rig.budget(1)));
    const uint32_t a = 1;
    const uint32_t b = 2;
    Acquisition first = cache->acquire(&a, 1);
    Acquisition second(std::move(first));
    CHECK(first.empty());
    CHECK(second.size() == 1);
    CHECK(cache->try_acquire(&b, 1).empty());
    first = std::move(second);
    CHECK(cache->try_acquire(&b, 1).empty());
    REQUIRE(first.wait(0, 2) != nullptr);
    cache->drain();
    first = Acquisition();
    CHECK(cache->try_acquire(&b, 1).size() == 1);
}
