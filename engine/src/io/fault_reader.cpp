#include "io/fault_reader.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "io/threads.h"

namespace moetuner {
namespace {

using Clock = std::chrono::steady_clock;

// What a failed read leaves behind: certainly not the file's bytes.
constexpr int junk = 0xDB;

class FaultReader final : public Reader, private Source {
  public:
    FaultReader(std::unique_ptr<Reader> inner, const Faults& faults)
        : inner_(std::move(inner)), faults_(faults), random_(faults.seed) {}

    ~FaultReader() override { stop(); }

    void start(Source& source, const std::vector<Memory>& memory) override {
        outer_ = &source;
        late_ = start_thread("moetuner-late", [this] { deliver_late(); });
        inner_->start(*this, memory);
    }

    void kick() noexcept override { inner_->kick(); }

    void stop() noexcept override {
        if (!late_.joinable()) {
            return;
        }
        inner_->stop();
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        changed_.notify_all();
        late_.join();
    }

    void set_depth(unsigned depth) noexcept override { inner_->set_depth(depth); }
    unsigned depth() const noexcept override { return inner_->depth(); }
    unsigned max_depth() const noexcept override { return inner_->max_depth(); }
    std::string describe() const override { return inner_->describe() + ", with faults"; }

  private:
    struct Result {
        Attempt attempt;
        int64_t value;
        Clock::time_point due;
    };

    size_t take(Attempt* out, size_t max) noexcept override { return outer_->take(out, max); }

    void done(const Attempt& attempt, int64_t value) noexcept override {
        std::unique_lock<std::mutex> lock(mutex_);
        value = perturbed(attempt, value);
        if (chance(faults_.delay)) {
            const auto wait = random_() % (faults_.max_delay_us + 1);
            held_.push_back({attempt, value, Clock::now() + std::chrono::microseconds(wait)});
        } else if (chance(faults_.reorder)) {
            held_.push_back({attempt, value, Clock::now()}); // the other thread's turn
        } else {
            lock.unlock();
            outer_->done(attempt, value);
            return;
        }
        lock.unlock();
        changed_.notify_one();
    }

    bool chance(unsigned per_mille) { return random_() % 1000 < per_mille; }

    int64_t perturbed(const Attempt& attempt, int64_t value) {
        const bool hard = attempt.file == faults_.hard_eio_file &&
                          attempt.offset < faults_.hard_to &&
                          attempt.offset + attempt.length > faults_.hard_from;
        if (hard || chance(faults_.eio)) {
            return lost(attempt, EIO);
        }
        if (attempt.direct && chance(faults_.einval)) {
            return lost(attempt, EINVAL);
        }
        if (chance(faults_.eintr)) {
            return lost(attempt, EINTR);
        }
        if (chance(faults_.eagain)) {
            return lost(attempt, EAGAIN);
        }
        if (value > 1 && chance(faults_.short_read)) {
            const auto less =
                1 + static_cast<int64_t>(random_() % static_cast<uint64_t>(value - 1));
            // Every second one ends at a block, as those of direct reads do.
            const int64_t shorter = random_() % 2 == 0 && less > 4096 ? less / 4096 * 4096 : less;
            std::memset(attempt.target + shorter, junk, static_cast<size_t>(value - shorter));
            return shorter;
        }
        return value;
    }

    static int64_t lost(const Attempt& attempt, int error) {
        std::memset(attempt.target, junk, attempt.length);
        return -error;
    }

    void deliver_late() noexcept {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            const auto next =
                std::min_element(held_.begin(), held_.end(),
                                 [](const Result& a, const Result& b) { return a.due < b.due; });
            if (next == held_.end()) {
                if (stopping_) {
                    return;
                }
                changed_.wait(lock);
                continue;
            }
            if (!stopping_ && next->due > Clock::now()) {
                changed_.wait_until(lock, Clock::time_point(next->due));
                continue;
            }
            const Result result = *next;
            held_.erase(next);
            lock.unlock();
            outer_->done(result.attempt, result.value);
            inner_->kick(); // what was retried, or had no room
            lock.lock();
        }
    }

    const std::unique_ptr<Reader> inner_;
    const Faults faults_;
    Source* outer_ = nullptr;
    std::thread late_;
    std::mutex mutex_; // guards what follows
    std::condition_variable changed_;
    std::mt19937_64 random_;
    std::vector<Result> held_;
    bool stopping_ = false;
};

} // namespace

std::unique_ptr<Reader> make_fault_reader(std::unique_ptr<Reader> inner, const Faults& faults) {
    return std::make_unique<FaultReader>(std::move(inner), faults);
}

} // namespace moetuner
