// What the reader is given, and what becomes of its results.
#include <algorithm>
#include <cstring>
#include <ctime>

#include "cache/clock.h"
#include "cache/impl.h"
#include "io/futex.h"

namespace moetuner {
namespace {

size_t latency_bucket(int64_t ns) {
    const auto us = static_cast<uint64_t>(std::max<int64_t>(ns / 1000, 1));
    const auto power = static_cast<size_t>(63 - __builtin_clzll(us));
    return std::min(power, latency_buckets - 1);
}

} // namespace

size_t Cache::Impl::take(Attempt* out, size_t max) noexcept {
    const int64_t now = now_ns();
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t n = 0;
    for (; n < max && !closing_ && !retries_.empty(); ++n) {
        const uint32_t tag = retries_.back();
        retries_.pop_back();
        const RangeRead& read = pieces_[tag].read;
        out[n] = next_attempt(read, tag, files_.direct(read.file));
    }
    for (; n < max && !queue_.empty() && !idle_pieces_.empty(); ++n) {
        const ReadKey& key = *queue_.begin();
        Slot& slot = slots_.at(key.slot);
        SlotSlice& slice = slot.slices[key.slice];
        const PieceRead part = piece_read(slice.extent, slice.read, piece_bytes_, slice.next);

        const uint32_t tag = idle_pieces_.back();
        idle_pieces_.pop_back();
        Piece& piece = pieces_[tag];
        piece.slot = &slot;
        piece.slice = key.slice;
        piece.index = slice.next;
        piece.layer = units_[slot.unit].layer;
        piece.begun_ns = now;
        piece.read = RangeRead{};
        piece.read.file = slice.extent.file;
        piece.read.offset = slice.read.offset + part.begin;
        piece.read.target = slice.region + part.begin;
        piece.read.length = part.length;
        piece.read.needed = part.needed;
        out[n] = next_attempt(piece.read, tag, files_.direct(piece.read.file));

        ++stats_.in_flight;
        stats_.in_flight_high = std::max(stats_.in_flight_high, stats_.in_flight);
        if (++slice.next == slice.read.pieces) {
            dequeue(slice);
        }
    }
    return n;
}

void Cache::Impl::done(const Attempt& attempt, int64_t result) noexcept {
    const auto tag = static_cast<uint32_t>(attempt.tag);
    Judgement judgement = judge(pieces_[tag].read, attempt, result, block_);
    if (judgement.refused_direct) {
        files_.turn_buffered(attempt.file, std::strerror(static_cast<int>(-result)));
    }
    if (!attempt.direct && result > 0) {
        files_.forget(attempt.file, attempt.offset, static_cast<uint64_t>(result));
    }
    if (judgement.verdict == Verdict::again_paused) {
        const timespec millisecond{0, 1000000};
        nanosleep(&millisecond, nullptr);
    }
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stats_.buffered += attempt.direct ? 0 : 1;
        if (judgement.verdict == Verdict::again || judgement.verdict == Verdict::again_paused) {
            if (!closing_) {
                ++stats_.retries;
                retries_.push_back(tag); // the reader asks for more after each result
                return;
            }
            judgement = {Verdict::failed, ECANCELED};
        }
    }
    finish(tag, judgement);
}

// The piece is over. Its slot may be given away as soon as its state says so, hence the
// order: what is needed of the piece is copied before, the lock is taken after.
void Cache::Impl::finish(uint32_t tag, const Judgement& judgement) noexcept {
    const Piece piece = pieces_[tag];
    SliceState& state = piece.slot->slices[piece.slice].state;
    const bool failed = judgement.verdict == Verdict::failed;
    std::string text;
    bool wake = false;
    if (failed) {
        text = failure_text(piece, judgement.error);
        record_failure(piece, text);
        wake = state.fail();
    } else {
        wake = state.arrive(piece.index);
    }
    bool canceled = false;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        canceled = closing_;
        idle_pieces_.push_back(tag);
        --stats_.in_flight;
        if (failed) {
            ++stats_.failures;
        } else {
            ++stats_.reads;
            layers_[piece.layer].bytes += piece.read.done;
            ++stats_.latency[latency_bucket(now_ns() - piece.begun_ns)];
        }
        if (someone_waits_for_room()) {
            room_.notify_all(); // the slot may have come to rest
        }
        if (stats_.in_flight == 0 && queue_.empty()) {
            quiet_.notify_all();
        }
    }
    if (wake) {
        futex_wake_all(state.word());
    }
    if (failed && !canceled && log_) {
        log_(LogLevel::error, text);
    }
}

// Before the state tells of it. The rest of the slice is not worth reading.
void Cache::Impl::record_failure(const Piece& piece, const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    errors_.emplace(std::make_pair(piece.slot->number, piece.slice), text);
    SlotSlice& slice = piece.slot->slices[piece.slice];
    if (slice.queued) {
        dequeue(slice);
        slice.state.abandon(slice.read.pieces - slice.next);
    }
}

std::string Cache::Impl::failure_text(const Piece& piece, int error) const {
    const RangeRead& read = piece.read;
    const std::string why =
        error == 0 ? "the file ends there"
                   : std::string(std::strerror(error)) + " (errno " + std::to_string(error) + ")";
    return "cannot read " + files_.name(read.file) + " at offset " +
           std::to_string(read.offset + read.done) + ": " + why;
}

void Cache::Impl::drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    quiet_.wait(lock, [&] { return stats_.in_flight == 0 && queue_.empty(); });
}

} // namespace moetuner
