// Reads for later: behind everything that is wanted now, and in nobody's way.
#include <algorithm>
#include <doctest/doctest.h>
#include <vector>

#include "cache/cache.h"
#include "support.h"

using namespace support;

namespace {

const std::vector<uint64_t> slices{16384, 16384};

struct Manual {
    explicit Manual(uint64_t slots, unsigned depth = 256, uint32_t min_age = 2)
        : rig(make_model(2, 8, slices)) {
        auto owned = std::make_unique<ManualReader>(depth);
        reader = owned.get();
        CacheOptions options;
        options.budget = rig.budget(slots);
        options.piece = 65536; // one piece a slice
        options.prefetch_min_age = min_age;
        cache = rig.cache(std::move(owned), options);
    }

    // Acquires and releases; everything queued is read.
    void use(const std::vector<uint32_t>& units) {
        Acquisition got = cache->acquire(units.data(), units.size());
        reader->complete_all();
    }

    // (unit, slice) of each attempt under way.
    std::vector<std::pair<uint32_t, unsigned>> taken() const {
        std::vector<std::pair<uint32_t, unsigned>> named;
        for (const Attempt& attempt : reader->taken()) {
            for (uint32_t u = 0; u < rig.model.units.size(); ++u) {
                for (unsigned s = 0; s < 2; ++s) {
                    if (rig.model.units[u].slices[s].offset / 4096 * 4096 == attempt.offset) {
                        named.emplace_back(u, s);
                    }
                }
            }
        }
        return named;
    }

    // What is read from now on, in order.
    std::vector<std::pair<uint32_t, unsigned>> read_all() {
        std::vector<std::pair<uint32_t, unsigned>> order;
        while (!reader->taken().empty()) {
            order.push_back(taken().front());
            reader->complete(0);
        }
        return order;
    }

    size_t prefetch(const std::vector<uint32_t>& units) {
        return cache->prefetch(units.data(), units.size());
    }

    std::vector<uint32_t> there() const {
        auto units = cache->hot();
        std::sort(units.begin(), units.end());
        return units;
    }

    Rig rig;
    ManualReader* reader = nullptr;
    std::unique_ptr<Cache> cache;
};

using Named = std::vector<std::pair<uint32_t, unsigned>>;

} // namespace

TEST_CASE("what was read ahead is there when it is acquired") {
    Manual manual(8);
    CHECK(manual.prefetch({3, 4}) == 2);
    CHECK(manual.taken() == Named{{3, 0}, {4, 0}, {3, 1}, {4, 1}});
    manual.reader->complete_all();
    const uint32_t units[] = {4, 3};
    Acquisition got = manual.cache->acquire(units, 2);
    CHECK(got.ready(0, 1));
    CHECK(manual.reader->taken().empty());
    const CacheStats stats = manual.cache->stats();
    CHECK(stats.total.hits == 2);
    CHECK(stats.prefetched == 2);
    CHECK(stats.prefetch_used == 2);
}

TEST_CASE("what is wanted now overtakes what was queued for later") {
    Manual manual(8, 1);
    manual.prefetch({0, 1});
    const uint32_t now = 5;
    Acquisition got = manual.cache->acquire(&now, 1);
    CHECK(manual.read_all() == Named{{0, 0}, {5, 0}, {5, 1}, {1, 0}, {0, 1}, {1, 1}});
}

TEST_CASE("what was queued for later and is wanted now moves ahead") {
    Manual manual(8, 1);
    manual.prefetch({0, 1, 2});
    const uint32_t now = 2;
    Acquisition got = manual.cache->acquire(&now, 1);
    CHECK(manual.cache->stats().total.joined == 1);
    CHECK(manual.read_all() == Named{{0, 0}, {2, 0}, {2, 1}, {1, 0}, {0, 1}, {1, 1}});
    CHECK(got.ready(0, 1));
}

TEST_CASE("reading ahead takes no slot from what is pinned or was used lately") {
    Manual manual(4);
    manual.use({0, 1}); // three acquisitions ago
    manual.use({2});
    manual.use({3});
    const uint32_t pinned = 1;
    Acquisition got = manual.cache->acquire(&pinned, 1);
    // Of 0, 2 and 3 only 0 and 2 are old enough.
    CHECK(manual.prefetch({8, 9, 10}) == 2);
    manual.reader->complete_all();
    CHECK(manual.there() == std::vector<uint32_t>{1, 3, 8, 9});
    CHECK(manual.prefetch({11}) == 0); // what was read ahead is not old either
}

TEST_CASE(
    "an acquisition takes the slots of what is queued for later, never of what is under way") {
    Manual manual(3, 1);
    manual.prefetch({0, 1, 2}); // 0's first slice is under way
    const uint32_t units[] = {8, 9, 10};
    Acquisition got = manual.cache->acquire(units, 3);
    CHECK(got.size() == 2);
    CHECK(got.rest() == std::vector<uint32_t>{2});
    CHECK(manual.cache->stats().prefetch_dropped == 2);
    CHECK(manual.read_all() == Named{{0, 0}, {8, 0}, {9, 0}, {8, 1}, {9, 1}, {0, 1}});
    for (size_t i = 0; i < 2; ++i) {
        CHECK(manual.rig.right(units[i], 1, got.wait(i, 1)));
    }
}

TEST_CASE("reads left behind by a release are not wanted now") {
    Manual manual(8, 1);
    {
        const uint32_t unit = 0;
        const Acquisition abandoned = manual.cache->acquire(&unit, 1);
    }
    const uint32_t now = 1;
    Acquisition got = manual.cache->acquire(&now, 1);
    CHECK(manual.read_all() == Named{{0, 0}, {1, 0}, {1, 1}, {0, 1}});
}
