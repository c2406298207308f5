#include <doctest/doctest.h>
#include <fstream>
#include <numeric>
#include <vector>

#include "cache/cache.h"
#include "cache/hot_list.h"
#include "cache/replay.h"
#include "support.h"

using namespace support;

namespace {

CacheOptions options_of(uint64_t budget) {
    CacheOptions options;
    options.budget = budget;
    options.piece = 16384;
    return options;
}

const std::vector<uint64_t> slices{50000, 61441};

void use(Cache& cache, uint32_t unit) {
    const Acquisition got = cache.acquire(&unit, 1);
    REQUIRE(got.wait(0, 0) != nullptr);
    REQUIRE(got.wait(0, 1) != nullptr);
}

} // namespace

TEST_CASE("a list is what was saved") {
    Directory directory;
    const std::vector<uint32_t> list{5, 0, 99, 42};
    std::string error;
    for (int time = 0; time < 2; ++time) { // the second replaces the first
        REQUIRE(save_hot_list(directory.path("hot"), 0xdeadbeefcafe, 100, list, error));
    }
    std::vector<uint32_t> loaded;
    CHECK(load_hot_list(directory.path("hot"), 0xdeadbeefcafe, 100, loaded, error));
    CHECK(loaded == list);
    CHECK(error.empty());
}

TEST_CASE("another model's list, a damaged one and none are refused, with the file's name") {
    Directory directory;
    const std::string path = directory.path("hot");
    std::string error;
    std::vector<uint32_t> loaded{1};
    CHECK(!load_hot_list(path, 1, 10, loaded, error));
    CHECK(loaded.empty());
    CHECK(error.find(path) != std::string::npos);
    REQUIRE(save_hot_list(path, 1, 10, {3, 4}, error));
    CHECK(!load_hot_list(path, 2, 10, loaded, error));
    CHECK(!load_hot_list(path, 1, 11, loaded, error));
    for (const char* text : {"", "x", "moetuner-hot 2 1 10 0\n", "moetuner-hot 1 1 10 2\n3\n",
                             "moetuner-hot 1 1 10 1\n10\n", "moetuner-hot 1 1 10 2\n3\n3\n",
                             "moetuner-hot 1 1 10 1\n-1\n", "moetuner-hot 1 1 10 99999999999\n1\n",
                             "moetuner-hot 1 1 10 1\nfour\n"}) {
        CAPTURE(text);
        std::ofstream(path) << text;
        loaded = {1};
        error.clear();
        CHECK(!load_hot_list(path, 1, 10, loaded, error));
        CHECK(loaded.empty());
        CHECK(error.find(path) != std::string::npos);
    }
    CHECK(!save_hot_list("/nowhere/hot", 1, 10, {}, error));
    CHECK(error.find("/nowhere/hot") != std::string::npos);
}

TEST_CASE("a cache warmed with the list has the same units in the same order") {
    Rig rig(make_model(2, 8, slices));
    std::vector<uint32_t> hot;
    {
        const auto cache = rig.cache(pool(rig.files), options_of(rig.budget(5)));
        for (const uint32_t unit : {0U, 1U, 9U, 2U, 15U, 3U, 1U}) {
            use(*cache, unit);
        }
        hot = cache->hot();
    }
    CHECK(hot == std::vector<uint32_t>{1, 3, 15, 2, 9});
    const auto cache = rig.cache(pool(rig.files), options_of(rig.budget(5)));
    CHECK(cache->warm(hot) == 5);
    cache->drain();
    CHECK(cache->hot() == hot);
    const uint64_t read = cache->stats().reads;
    for (const uint32_t unit : {9U, 1U}) {
        use(*cache, unit);
    }
    CHECK(cache->stats().reads == read);
    CHECK(cache->stats().total.hits == 2);
    CHECK(cache->stats().prefetch_used == 2);
    use(*cache, 7);
    CHECK(cache->hot() == std::vector<uint32_t>{7, 1, 9, 3, 15}); // 2 was the coldest
}

TEST_CASE("warming takes free slots only, the hottest units, and no nonsense") {
    Rig rig(make_model(2, 8, slices));
    const auto cache = rig.cache(pool(rig.files), options_of(rig.budget(3)));
    use(*cache, 4);
    CHECK(cache->warm({4, 1000000, 6, 6, 5, 7}) == 2);
    cache->drain();
    CHECK(cache->hot() == std::vector<uint32_t>{6, 5, 4});
}

TEST_CASE("a replay reads each unit of the list") {
    Model model = make_model(2, 8, slices);
    for (uint32_t unit = 8; unit < 12; ++unit) {
        model.units[unit].slices[1].bytes = 20000; // a second size class
    }
    Rig rig(model);
    std::vector<uint32_t> order(16);
    std::iota(order.begin(), order.end(), 0U);
    uint64_t least = 0;
    for (const UnitSpec& unit : rig.model.units) {
        for (const Extent& slice : unit.slices) {
            least += slice.bytes;
        }
    }
    std::vector<uint32_t> three_times;
    for (int i = 0; i < 3; ++i) {
        three_times.insert(three_times.end(), order.begin(), order.end());
    }
    for (const ReaderKind kind : {ReaderKind::pool, ReaderKind::automatic}) {
        ReplayOptions options;
        options.reader.kind = kind;
        options.reader.depth = 2;
        options.reader.threads = 2;
        options.piece = 16384;
        const ReplayResult once = replay(rig.model.units, order, options, rig.files, Log());
        CHECK(once.error.empty());
        CHECK(once.bytes >= least);
        CHECK(once.bytes <= least + 32 * 2 * 4096);
        CHECK(once.seconds > 0);
        CHECK(!once.reader.empty());
        CHECK(replay(rig.model.units, {}, options, rig.files, Log()).bytes == 0);
        CHECK_THROWS_AS(replay(rig.model.units, {16}, options, rig.files, Log()), Error);
        CHECK(replay(rig.model.units, three_times, options, rig.files, Log()).error.empty());
    }
}
