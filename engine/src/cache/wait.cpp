// What compute threads do with an acquisition. The fast paths take no lock.
#include <utility>

#include "cache/clock.h"
#include "cache/impl.h"
#include "cache/ordering.h"
#include "io/futex.h"

namespace moetuner {
namespace {

void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory"); // yield is a no-op on most cores
#endif
}

} // namespace

Acquisition::~Acquisition() {
    if (cache_ != nullptr) {
        cache_->release(*this);
    }
}

Acquisition::Acquisition(Acquisition&& other) noexcept
    : cache_(std::exchange(other.cache_, nullptr)), entries_(std::move(other.entries_)),
      rest_(std::move(other.rest_)), sequence_(other.sequence_), running_(other.running_) {
    other.entries_.clear();
    other.rest_.clear();
}

Acquisition& Acquisition::operator=(Acquisition&& other) noexcept {
    if (this != &other) {
        Acquisition old(std::move(*this)); // released when it goes
        cache_ = std::exchange(other.cache_, nullptr);
        entries_ = std::move(other.entries_);
        rest_ = std::move(other.rest_);
        sequence_ = other.sequence_;
        running_ = other.running_;
        other.entries_.clear();
        other.rest_.clear();
    }
    return *this;
}

bool Acquisition::ready(size_t i, unsigned s) const {
    return entries_[i].slot->slices[s].state.ready();
}

const void* Acquisition::data(size_t i, unsigned s) const {
    const SlotSlice& slice = entries_[i].slot->slices[s];
    return slice.region + slice.read.lead;
}

const void* Acquisition::wait(size_t i, unsigned s) const {
    return ready(i, s) || cache_->impl_->wait(*this, i, s) ? data(i, s) : nullptr;
}

uint64_t Acquisition::arrived(size_t i, unsigned s) const {
    return cache_->impl_->arrived(entries_[i].slot->slices[s]);
}

uint64_t Acquisition::wait_arrived(size_t i, unsigned s, uint64_t bytes) const {
    return cache_->impl_->wait_arrived(*this, i, s, bytes);
}

size_t Acquisition::ready_first(unsigned s, uint32_t* order) const {
    return split_ready_first(
        size(), [&](size_t i) { return ready(i, s); }, order);
}

std::string Acquisition::error(size_t i, unsigned s) const {
    return cache_->impl_->error(*this, i, s);
}

uint64_t Cache::Impl::arrived(const SlotSlice& slice) const {
    return bytes_in_pieces(slice.extent, slice.read, piece_bytes_, slice.state.leading());
}

// Waits until `enough(word)` is true or waiting makes no sense.
template <typename Enough>
void Cache::Impl::sleep_until(const Acquisition& acquisition, size_t i, unsigned s, bool any_piece,
                              Enough&& enough) {
    const int64_t begun = now_ns();
    hasten(acquisition, s);
    SliceState& state = acquisition.entries_[i].slot->slices[s].state;
    const int64_t spin = spin_ns_.load(std::memory_order_relaxed);
    for (;;) {
        uint32_t word = state.load();
        if (enough(word) || SliceState::is_hopeless(word)) {
            break;
        }
        if (spin > 0 && now_ns() - begun < spin) {
            relax();
        } else if (state.mark_waiting(word, any_piece)) {
            futex_wait(state.word(), word);
        }
    }
    Waits& waits = waits_[units_[acquisition.entries_[i].unit].layer];
    waits.count.fetch_add(1, std::memory_order_relaxed);
    waits.ns.fetch_add(static_cast<uint64_t>(now_ns() - begun), std::memory_order_relaxed);
}

bool Cache::Impl::wait(const Acquisition& acquisition, size_t i, unsigned s) {
    const SliceState& state = acquisition.entries_[i].slot->slices[s].state;
    if (SliceState::is_hopeless(state.load())) {
        return false;
    }
    sleep_until(acquisition, i, s, false, [](uint32_t word) { return SliceState::is_ready(word); });
    return state.ready();
}

uint64_t Cache::Impl::wait_arrived(const Acquisition& acquisition, size_t i, unsigned s,
                                   uint64_t bytes) {
    const SlotSlice& slice = acquisition.entries_[i].slot->slices[s];
    const uint64_t wanted = std::min(bytes, slice.extent.bytes);
    uint64_t there = arrived(slice);
    if (there < wanted && !SliceState::is_hopeless(slice.state.load())) {
        // A piece's bit is set before the word changes, and the word was loaded before.
        sleep_until(acquisition, i, s, true, [&](uint32_t) {
            there = arrived(slice);
            return there >= wanted;
        });
    }
    return there >= wanted && !slice.state.failed() ? there : 0;
}

std::string Cache::Impl::error(const Acquisition& acquisition, size_t i, unsigned s) {
    const Slot& slot = *acquisition.entries_[i].slot;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = errors_.find({slot.number, s});
    if (found != errors_.end()) {
        return found->second;
    }
    return slot.slices[s].state.absent() ? "nobody has asked for this slice" : "";
}

// The operation on slice `s` runs now: what it and its successors still have in the queue
// moves ahead of later operations of other acquisitions.
void Cache::Impl::hasten(const Acquisition& acquisition, unsigned s) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (acquisition.running_ >= s) {
        return;
    }
    acquisition.running_ = s;
    for (const Acquisition::Entry& entry : acquisition.entries_) {
        for (uint32_t t = s; t < entry.slot->slice_count; ++t) {
            SlotSlice& slice = entry.slot->slices[t];
            const ReadKey key{t - s, acquisition.sequence_, entry.position, entry.slot->number, t};
            if (slice.queued && key < slice.key) {
                dequeue(slice);
                enqueue(slice, key);
            }
        }
    }
}

} // namespace moetuner
