#include <algorithm>
#include <doctest/doctest.h>
#include <random>
#include <vector>

#include "cache/policy.h"

using namespace moetuner;

namespace {

// The definition of least recently used: a list in order of use.
class Model {
  public:
    void insert(uint32_t unit) { order_.push_back(unit); }
    void erase(uint32_t unit) { order_.erase(std::find(order_.begin(), order_.end(), unit)); }
    void touch(uint32_t unit) {
        erase(unit);
        insert(unit);
    }
    bool has(uint32_t unit) const {
        return std::find(order_.begin(), order_.end(), unit) != order_.end();
    }
    const std::vector<uint32_t>& order() const { return order_; }

  private:
    std::vector<uint32_t> order_;
};

} // namespace

TEST_CASE("LRU agrees with a list in order of use") {
    constexpr uint32_t units = 40;
    std::mt19937 random(1);
    for (int round = 0; round < 20; ++round) {
        const auto lru = make_lru(units);
        Model model;
        for (int step = 0; step < 500; ++step) {
            const auto unit = static_cast<uint32_t>(random() % units);
            if (!model.has(unit)) {
                lru->insert(unit);
                model.insert(unit);
            } else if (random() % 3 == 0) {
                lru->erase(unit);
                model.erase(unit);
            } else {
                lru->touch(unit);
                model.touch(unit);
            }
            REQUIRE(lru->order() == model.order());

            const uint32_t modulus = 1 + static_cast<uint32_t>(random() % 5);
            const auto may = [&](uint32_t candidate) { return candidate % modulus == 0; };
            const auto expected = std::find_if(model.order().begin(), model.order().end(), may);
            const auto victim = lru->victim(may);
            REQUIRE(victim.has_value() == (expected != model.order().end()));
            if (victim) {
                REQUIRE(*victim == *expected);
            }
        }
    }
}

TEST_CASE("asking for a victim erases nothing and asks about present units only") {
    const auto lru = make_lru(8);
    lru->insert(3);
    lru->insert(5);
    std::vector<uint32_t> asked;
    CHECK(!lru->victim([&](uint32_t unit) {
        asked.push_back(unit);
        return false;
    }));
    CHECK(asked == std::vector<uint32_t>{3, 5});
    CHECK(lru->order() == std::vector<uint32_t>{3, 5});
}
