// Readiness: what one word and a few bits promise.
#include <algorithm>
#include <array>
#include <atomic>
#include <doctest/doctest.h>
#include <numeric>
#include <thread>
#include <vector>

#include "cache/ordering.h"
#include "cache/slice_state.h"
#include "io/futex.h"

using namespace moetuner;

namespace {

struct Owned {
    explicit Owned(uint32_t words = 2) : bits(words) { state.attach(bits.data(), words); }
    std::vector<std::atomic<uint64_t>> bits;
    SliceState state;
};

} // namespace

TEST_CASE("absent, begun, arrived") {
    Owned owned;
    SliceState& state = owned.state;
    CHECK(state.absent());
    CHECK(state.idle());
    CHECK(!state.ready());
    state.begin(3);
    CHECK(!state.absent());
    CHECK(!state.ready());
    CHECK(!state.idle());
    CHECK(!state.arrive(0));
    CHECK(!state.arrive(2));
    CHECK(!state.ready());
    CHECK(state.leading() == 1);
    CHECK(!state.arrive(1));
    CHECK(state.ready());
    CHECK(state.idle());
    CHECK(state.leading() == 3);
    state.clear();
    CHECK(state.absent());
    CHECK(state.leading() == 0);
}

TEST_CASE("a slice that was abandoned is never ready, and can be taken up again") {
    Owned owned;
    SliceState& state = owned.state;
    state.begin(5);
    state.arrive(0);
    state.abandon(3); // one is under way
    CHECK(state.absent());
    CHECK(!state.idle());
    SUBCASE("before what was under way has come") {
        state.begin(3);
        state.arrive(1);
    }
    SUBCASE("after it") {
        state.arrive(1);
        CHECK(state.idle());
        CHECK(!state.ready());
        state.begin(3);
    }
    CHECK(!state.ready());
    for (uint32_t piece = 2; piece < 5; ++piece) {
        CHECK(!state.ready());
        state.arrive(piece);
    }
    CHECK(state.ready());
}

TEST_CASE("a failed slice is never ready, whatever comes after the failure") {
    Owned owned;
    SliceState& state = owned.state;
    state.begin(3);
    state.arrive(0);
    state.fail();
    CHECK(state.failed());
    CHECK(!state.idle());
    state.arrive(2);
    CHECK(state.idle());
    CHECK(!state.ready());
    CHECK(SliceState::is_hopeless(state.load()));
}

TEST_CASE("whoever sleeps is woken: for the slice by its last piece, for a piece by any") {
    Owned owned;
    SliceState& state = owned.state;
    state.begin(3);
    uint32_t word = state.load();
    REQUIRE(state.mark_waiting(word, false));
    CHECK(word == state.load());
    CHECK(!state.arrive(0));
    CHECK(!state.mark_waiting(word, true)); // the word has changed meanwhile
    word = state.load();
    REQUIRE(state.mark_waiting(word, true));
    CHECK(state.arrive(1));
    CHECK(state.arrive(2));
    CHECK(state.ready()); // marks are not part of readiness
    state.clear();
    state.begin(1);
    word = state.load();
    REQUIRE(state.mark_waiting(word, false));
    CHECK(state.fail());
}

TEST_CASE("a thread that sees a slice ready sees every piece's bytes") {
    // Plain memory written by two threads before arrive(): thread sanitizer is the judge.
    constexpr uint32_t pieces = 96;
    Owned owned;
    std::array<uint32_t, pieces> bytes{};
    for (uint32_t round = 1; round <= 200; ++round) {
        owned.state.clear();
        owned.state.begin(pieces);
        const auto read = [&](uint32_t first) {
            for (uint32_t piece = first; piece < pieces; piece += 2) {
                bytes[piece] = round;
                if (owned.state.arrive(piece)) {
                    futex_wake_all(owned.state.word());
                }
            }
        };
        std::thread even(read, 0);
        std::thread odd(read, 1);
        while (!owned.state.ready()) {
            const uint32_t leading = owned.state.leading();
            for (uint32_t piece = 0; piece < leading; ++piece) {
                REQUIRE(bytes[piece] == round);
            }
            uint32_t word = owned.state.load();
            if (!SliceState::is_ready(word) && owned.state.mark_waiting(word, round % 2 == 0)) {
                futex_wait(owned.state.word(), word);
            }
        }
        REQUIRE(std::all_of(bytes.begin(), bytes.end(), [&](uint32_t b) { return b == round; }));
        even.join();
        odd.join();
    }
}

TEST_CASE("ready ones first: one question each, whatever the answers do meanwhile") {
    constexpr size_t n = 8;
    std::array<uint32_t, n> order{};
    for (unsigned answers = 0; answers < 1U << n; ++answers) {
        std::array<unsigned, n> asked{};
        // Every answer is true from the second question on: the historic bug, which asked
        // once for either part, then has the unit in neither (or in both).
        const size_t ready = split_ready_first(
            n, [&](size_t i) { return asked[i]++ > 0 || (answers >> i & 1) != 0; }, order.data());
        for (const unsigned times : asked) {
            REQUIRE(times == 1);
        }
        auto sorted = order;
        std::sort(sorted.begin(), sorted.end());
        for (uint32_t i = 0; i < n; ++i) {
            REQUIRE(sorted[i] == i);
        }
        REQUIRE(std::is_sorted(order.begin(), order.begin() + ready));
        REQUIRE(std::is_sorted(order.begin() + ready, order.end()));
        for (size_t k = 0; k < n; ++k) {
            REQUIRE((answers >> order[k] & 1) == (k < ready ? 1 : 0));
        }
    }
}

TEST_CASE("ready ones first while a reader makes them ready") {
    constexpr uint32_t n = 64;
    std::vector<std::atomic<uint64_t>> bits(n);
    std::vector<SliceState> states(n);
    std::vector<uint32_t> order(n);
    for (uint32_t i = 0; i < n; ++i) {
        states[i].attach(&bits[i], 1);
    }
    for (int round = 0; round < 300; ++round) {
        for (SliceState& state : states) {
            state.clear();
            state.begin(1);
        }
        std::thread reader([&] {
            for (SliceState& state : states) {
                state.arrive(0);
            }
        });
        size_t ready = 0;
        do {
            ready = split_ready_first(
                n, [&](size_t i) { return states[i].ready(); }, order.data());
            std::vector<uint32_t> sorted = order;
            std::sort(sorted.begin(), sorted.end());
            for (uint32_t i = 0; i < n; ++i) {
                REQUIRE(sorted[i] == i);
            }
        } while (ready < n);
        reader.join();
    }
}
