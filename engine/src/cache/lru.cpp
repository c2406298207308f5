#include "cache/policy.h"

#include <limits>

namespace moetuner {
namespace {

constexpr uint32_t none = std::numeric_limits<uint32_t>::max();

// Least recently used first: a doubly linked list through arrays, one place per unit.
class Lru final : public Policy {
  public:
    explicit Lru(uint32_t units) : links_(units) {}

    void insert(uint32_t unit) override {
        Link& link = links_[unit];
        link.older = newest_;
        link.newer = none;
        (newest_ == none ? oldest_ : links_[newest_].newer) = unit;
        newest_ = unit;
    }

    void touch(uint32_t unit) override {
        if (newest_ != unit) {
            erase(unit);
            insert(unit);
        }
    }

    void erase(uint32_t unit) override {
        const Link link = links_[unit];
        (link.older == none ? oldest_ : links_[link.older].newer) = link.newer;
        (link.newer == none ? newest_ : links_[link.newer].older) = link.older;
    }

    std::optional<uint32_t> victim(const May& may) const override {
        for (uint32_t unit = oldest_; unit != none; unit = links_[unit].newer) {
            if (may(unit)) {
                return unit;
            }
        }
        return std::nullopt;
    }

    std::vector<uint32_t> order() const override {
        std::vector<uint32_t> units;
        for (uint32_t unit = oldest_; unit != none; unit = links_[unit].newer) {
            units.push_back(unit);
        }
        return units;
    }

  private:
    struct Link {
        uint32_t older = none;
        uint32_t newer = none;
    };
    std::vector<Link> links_;
    uint32_t oldest_ = none;
    uint32_t newest_ = none;
};

} // namespace

std::unique_ptr<Policy> make_lru(uint32_t units) { return std::make_unique<Lru>(units); }

} // namespace moetuner
