// Which unit has to go. A policy sees units, never slots, files or time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace moetuner {

// Deterministic: the same calls give the same victims. One instance per size class, called
// under the cache's lock by one thread at a time.
class Policy {
  public:
    virtual ~Policy() = default;

    virtual void insert(uint32_t unit) = 0; // was absent; counts as its first use
    virtual void touch(uint32_t unit) = 0;  // is present; used once more
    virtual void erase(uint32_t unit) = 0;  // is present

    // The unit to give up first among those that `may` accepts; `may` is asked about
    // present units, best victim first. Nothing if it accepts none. Erases nothing.
    using May = std::function<bool(uint32_t unit)>;
    virtual std::optional<uint32_t> victim(const May& may) const = 0;

    // All present units, the one to give up first at the front.
    virtual std::vector<uint32_t> order() const = 0;
};

// `units`: how many there are in the model; unit numbers are below it.
using PolicyFactory = std::function<std::unique_ptr<Policy>(uint32_t units)>;

std::unique_ptr<Policy> make_lru(uint32_t units);

} // namespace moetuner
