// Whether one slice in one slot has arrived: what compute threads and the reader share.
#pragma once

#include <atomic>
#include <cstdint>

namespace moetuner {

// One word, and a bit per piece.
//
// Who writes: the cache, under its lock, starts, abandons and clears; the reader's threads
// count pieces down without the lock; waiting threads add their mark. Every change is one
// atomic operation on the word, so the count-downs form one release sequence: a thread
// that loads (acquire) the value 0 sees the bytes of all pieces, whichever threads read
// them. That is all the ordering there is, and enough on Arm.
class SliceState {
  public:
    // Is there: nothing outstanding, failed, or absent. One acquire load.
    bool ready() const noexcept { return is_ready(word_.load(std::memory_order_acquire)); }

    // No piece is queued or under way. Once true only the cache, under its lock, can
    // change it.
    bool idle() const noexcept { return (load() & count_mask) == 0; }
    bool absent() const noexcept { return (load() & absent_bit) != 0; }
    bool failed() const noexcept { return (load() & failed_bit) != 0; }
    uint32_t outstanding() const noexcept { return load() & count_mask; }

    uint32_t load() const noexcept { return word_.load(std::memory_order_acquire); }
    const std::atomic<uint32_t>& word() const noexcept { return word_; }
    static bool is_ready(uint32_t word) noexcept { return (word & ~waiter_bits) == 0; }
    // Waiting makes no sense: it failed, or nobody asked for it.
    static bool is_hopeless(uint32_t word) noexcept {
        return (word & (failed_bit | absent_bit)) != 0;
    }

    // --- the cache, under its lock ---

    // `bits`: room for the pieces, ceil(pieces / 64) words that outlive the state.
    void attach(std::atomic<uint64_t>* bits, uint32_t words) noexcept {
        bits_ = bits;
        words_ = words;
        clear();
    }

    // Nothing is there. Only when idle and not pinned: nobody looks.
    void clear() noexcept {
        for (uint32_t i = 0; i < words_; ++i) {
            bits_[i].store(0, std::memory_order_relaxed);
        }
        word_.store(absent_bit, std::memory_order_relaxed);
    }

    // `pieces` (at least 1) are queued; it is absent no longer. Pieces of before the slice
    // was abandoned may still be under way. Relaxed: acquirers learn of it by the lock.
    void begin(uint32_t pieces) noexcept {
        word_.fetch_add(pieces - absent_bit, std::memory_order_relaxed);
    }

    // `pieces` will not be read after all: absent again. Keeps a failure.
    void abandon(uint32_t pieces) noexcept {
        word_.fetch_add(absent_bit - pieces, std::memory_order_relaxed);
    }

    // --- the reader ---

    // Piece number `piece` has arrived. True: someone sleeps who must be woken, by
    // futex_wake_all(word()); by then the slot may have another meaning already.
    bool arrive(uint32_t piece) noexcept {
        bits_[piece / 64].fetch_or(1ULL << (piece % 64), std::memory_order_release);
        const uint32_t before = word_.fetch_sub(1, std::memory_order_release);
        return (before & piece_waiter) != 0 ||
               ((before & slice_waiter) != 0 && (before & count_mask) == 1);
    }

    // A piece failed for good. The failure is there before the count goes down.
    bool fail() noexcept {
        word_.fetch_or(failed_bit, std::memory_order_release);
        return (word_.fetch_sub(1, std::memory_order_release) & waiter_bits) != 0;
    }

    // --- those who compute, while they have the slot pinned ---

    // Pieces that have arrived without a gap from the first on.
    uint32_t leading() const noexcept {
        for (uint32_t i = 0; i < words_; ++i) {
            const uint64_t missing = ~bits_[i].load(std::memory_order_acquire);
            if (missing != 0) {
                return i * 64 + static_cast<uint32_t>(__builtin_ctzll(missing));
            }
        }
        return words_ * 64;
    }

    // Marks that someone is about to sleep on `word`: until the whole slice is there, or
    // until any piece comes. False: the word has changed, look again. The mark stays until
    // clear(): at worst it costs a needless system call.
    bool mark_waiting(uint32_t& word, bool any_piece) noexcept {
        const uint32_t bit = any_piece ? piece_waiter : slice_waiter;
        if ((word & bit) == 0) {
            if (!word_.compare_exchange_strong(word, word | bit, std::memory_order_relaxed)) {
                return false;
            }
            word |= bit;
        }
        return true;
    }

  private:
    static constexpr uint32_t piece_waiter = 1U << 31;
    static constexpr uint32_t slice_waiter = 1U << 30;
    static constexpr uint32_t waiter_bits = piece_waiter | slice_waiter;
    static constexpr uint32_t failed_bit = 1U << 29;
    static constexpr uint32_t absent_bit = 1U << 28;
    static constexpr uint32_t count_mask = absent_bit - 1;

    std::atomic<uint32_t> word_{absent_bit};
    std::atomic<uint64_t>* bits_ = nullptr;
    uint32_t words_ = 0;
};

} // namespace moetuner
