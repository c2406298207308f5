#include "cache/cache.h"

#include <algorithm>
#include <utility>

#include "cache/impl.h"

namespace moetuner {
namespace {

constexpr uint64_t largest_registration = 1ULL << 30; // the kernel's limit for one buffer
constexpr uint32_t largest_piece = 64U << 20;

std::vector<UnitSpec> checked(std::vector<UnitSpec> units, const Files& files) {
    if (units.empty()) {
        throw Error("there is no expert to cache");
    }
    for (const UnitSpec& unit : units) {
        if (unit.slices.empty() || unit.slices.size() > max_slices) {
            throw Error("an expert of layer " + std::to_string(unit.layer) + " has " +
                        std::to_string(unit.slices.size()) + " slices");
        }
        for (const Extent& slice : unit.slices) {
            if (slice.file >= files.count()) {
                throw Error("an expert lies in a file that was never opened");
            }
            const uint64_t size = files.size(slice.file);
            if (slice.bytes == 0 || slice.bytes > size || slice.offset > size - slice.bytes) {
                throw Error("an expert of layer " + std::to_string(unit.layer) +
                            " reaches past the end of " + files.name(slice.file) + " (" +
                            std::to_string(slice.bytes) + " bytes at " +
                            std::to_string(slice.offset) + " of " + std::to_string(size) + ")");
            }
        }
    }
    return units;
}

uint32_t piece_size(uint32_t wanted, uint64_t block) {
    return static_cast<uint32_t>(round_up(std::clamp(wanted, 1U, largest_piece), block));
}

uint32_t layer_count(const std::vector<UnitSpec>& units) {
    uint32_t count = 0;
    for (const UnitSpec& unit : units) {
        count = std::max(count, unit.layer + 1);
    }
    return count;
}

// The arena in blocks that can be registered; no slot straddles two.
std::vector<Memory> registrable(const Layout& layout, std::byte* arena) {
    std::vector<Memory> blocks;
    for (const SizeClass& size : layout.classes) {
        const uint64_t together = std::max<uint64_t>(1, largest_registration / size.slot_bytes);
        for (uint64_t slot = 0; slot < size.slots; slot += together) {
            const uint64_t count = std::min<uint64_t>(together, size.slots - slot);
            blocks.push_back({arena + size.offset + slot * size.slot_bytes,
                              static_cast<size_t>(count * size.slot_bytes)});
        }
    }
    return blocks;
}

} // namespace

Cache::Impl::Impl(std::vector<UnitSpec> units, const CacheOptions& options, Files& files,
                  std::unique_ptr<Reader> reader, Log log)
    : units_(checked(std::move(units), files)), options_(options), files_(files),
      log_(std::move(log)), block_(files.block()), piece_bytes_(piece_size(options.piece, block_)),
      layout_(plan_layout(units_, options.budget, block_, piece_bytes_)),
      arena_(layout_.bytes, block_, options.hugepages, options.lock), reader_(std::move(reader)),
      waits_(std::make_unique<Waits[]>(layer_count(units_))), spin_ns_(options.spin_ns),
      slots_(units_, layout_, arena_.base(), block_, piece_bytes_, options.policy),
      layers_(layer_count(units_)) {
    // Twice the depth: a reader may hold results back while it takes more.
    const uint32_t places = 2 * reader_->max_depth();
    pieces_.resize(places);
    idle_pieces_.reserve(places);
    retries_.reserve(places);
    for (uint32_t tag = places; tag-- > 0;) {
        idle_pieces_.push_back(tag);
    }
    reader_->start(*this, registrable(layout_, arena_.base()));
}

Cache::Impl::~Impl() {
    std::vector<uint32_t> unfinished;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true; // from here on take() gives nothing, and done() retries nothing
        while (!queue_.empty()) {
            abandon(slots_.at(queue_.begin()->slot));
        }
        unfinished.swap(retries_);
    }
    for (const uint32_t tag : unfinished) {
        finish(tag, {Verdict::failed, ECANCELED});
    }
    reader_->stop();
}

CacheShape Cache::Impl::shape() {
    const std::lock_guard<std::mutex> lock(mutex_);
    CacheShape shape;
    shape.budget = options_.budget;
    shape.arena_bytes = arena_.bytes();
    shape.peak_bytes = slots_.peak_bytes();
    shape.locked_bytes = arena_.locked_bytes();
    shape.lock_errno = arena_.lock_errno();
    shape.units = static_cast<uint32_t>(units_.size());
    shape.slots = slots_.count();
    shape.used_slots = slots_.used();
    shape.classes = static_cast<uint32_t>(layout_.classes.size());
    shape.block = block_;
    return shape;
}

std::vector<LayerStats> Cache::Impl::layer_stats() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<LayerStats> layers = layers_;
    for (size_t i = 0; i < layers.size(); ++i) {
        layers[i].waits = waits_[i].count.load(std::memory_order_relaxed);
        layers[i].wait_ns = waits_[i].ns.load(std::memory_order_relaxed);
    }
    return layers;
}

CacheStats Cache::Impl::stats() {
    const std::vector<LayerStats> layers = layer_stats();
    const std::lock_guard<std::mutex> lock(mutex_);
    CacheStats all = stats_;
    all.queued = static_cast<uint32_t>(queue_.size());
    for (const LayerStats& layer : layers) {
        all.total.hits += layer.hits;
        all.total.joined += layer.joined;
        all.total.misses += layer.misses;
        all.total.bytes += layer.bytes;
        all.total.waits += layer.waits;
        all.total.wait_ns += layer.wait_ns;
        all.total.evictions += layer.evictions;
    }
    return all;
}

Cache::Cache(std::vector<UnitSpec> units, const CacheOptions& options, Files& files,
             std::unique_ptr<Reader> reader, Log log)
    : impl_(std::make_unique<Impl>(std::move(units), options, files, std::move(reader),
                                   std::move(log))) {}

Cache::~Cache() = default;

Acquisition Cache::acquire(const uint32_t* units, size_t n, Slices slices) {
    return impl_->acquire(*this, units, n, slices, true);
}

Acquisition Cache::try_acquire(const uint32_t* units, size_t n, Slices slices) {
    return impl_->acquire(*this, units, n, slices, false);
}

void Cache::release(Acquisition& acquisition) { impl_->release(acquisition); }

size_t Cache::prefetch(const uint32_t* units, size_t n, Slices slices) {
    return impl_->prefetch(units, n, slices);
}

std::vector<uint32_t> Cache::hot() const { return impl_->hot(); }

size_t Cache::warm(const std::vector<uint32_t>& hottest_first) {
    return impl_->warm(hottest_first);
}

void Cache::drain() { impl_->drain(); }

void Cache::set_depth(unsigned depth) {
    impl_->reader_->set_depth(depth);
    impl_->reader_->kick();
}

unsigned Cache::depth() const { return impl_->reader_->depth(); }
unsigned Cache::max_depth() const { return impl_->reader_->max_depth(); }

void Cache::set_spin(uint32_t ns) { impl_->spin_ns_.store(ns, std::memory_order_relaxed); }

std::string Cache::describe_reader() const { return impl_->reader_->describe(); }
CacheShape Cache::shape() const { return impl_->shape(); }
CacheStats Cache::stats() const { return impl_->stats(); }
std::vector<LayerStats> Cache::layer_stats() const { return impl_->layer_stats(); }

uint32_t Cache::unit_count() const { return static_cast<uint32_t>(impl_->units_.size()); }

uint64_t Cache::unit_bytes(uint32_t unit) const {
    uint64_t sum = 0;
    for (const Extent& slice : impl_->units_[unit].slices) {
        sum += slice.bytes;
    }
    return sum;
}

uint32_t Cache::slots_for(uint32_t unit) const {
    return impl_->layout_.classes[impl_->layout_.class_of[unit]].slots;
}

} // namespace moetuner
