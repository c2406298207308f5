#include "io/pool_reader.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <unistd.h>

#include "io/threads.h"

namespace moetuner {
namespace {

constexpr unsigned most_threads = 64;

class PoolReader final : public Reader {
  public:
    PoolReader(unsigned threads, Files& files)
        : files_(files), wanted_(std::clamp(threads, 1U, most_threads)) {}

    ~PoolReader() override { stop(); }

    void start(Source& source, const std::vector<Memory>& /*memory*/) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        source_ = &source;
        try {
            grow();
        } catch (const Error&) {
            // Fewer threads are slower, none at all is a refusal.
            if (threads_.empty()) {
                throw;
            }
            wanted_ = static_cast<unsigned>(threads_.size());
        }
    }

    void kick() noexcept override {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ++kicks_;
        }
        work_.notify_all();
    }

    void stop() noexcept override {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        work_.notify_all();
        for (std::thread& thread : threads_) {
            thread.join();
        }
        threads_.clear();
    }

    void set_depth(unsigned depth) noexcept override {
        const std::lock_guard<std::mutex> lock(mutex_);
        wanted_ = std::clamp(depth, 1U, most_threads);
        if (stopping_ || source_ == nullptr) {
            return;
        }
        try {
            grow();
        } catch (const Error&) {
            wanted_ = static_cast<unsigned>(threads_.size());
        }
        ++kicks_;
        work_.notify_all();
    }

    unsigned depth() const noexcept override {
        const std::lock_guard<std::mutex> lock(mutex_);
        return wanted_;
    }

    unsigned max_depth() const noexcept override { return most_threads; }

    std::string describe() const override {
        return "pread, " + std::to_string(depth()) + " threads";
    }

  private:
    void grow() {
        while (threads_.size() < wanted_) {
            const auto index = static_cast<unsigned>(threads_.size());
            threads_.push_back(start_thread("moetuner-read", [this, index] { run(index); }));
        }
    }

    void run(unsigned index) noexcept {
        for (;;) {
            uint64_t seen = 0;
            bool mine = false;
            {
                const std::lock_guard<std::mutex> lock(mutex_);
                if (stopping_) {
                    return;
                }
                seen = kicks_;
                mine = index < wanted_; // those above stay parked
            }
            Attempt attempt;
            if (mine && source_->take(&attempt, 1) == 1) {
                source_->done(attempt, carry_out(attempt));
                continue;
            }
            // A kick since `seen` was read may have been for work that take() missed.
            std::unique_lock<std::mutex> lock(mutex_);
            work_.wait(lock, [&] { return stopping_ || kicks_ != seen; });
        }
    }

    int64_t carry_out(const Attempt& attempt) const noexcept {
        const ssize_t got = pread(files_.descriptor(attempt.file, attempt.direct), attempt.target,
                                  attempt.length, static_cast<off_t>(attempt.offset));
        return got >= 0 ? got : -errno;
    }

    Files& files_;
    mutable std::mutex mutex_; // guards what follows
    std::condition_variable work_;
    Source* source_ = nullptr; // set once, before the threads: they need no lock for it
    uint64_t kicks_ = 0;
    unsigned wanted_; // threads that may take work
    bool stopping_ = false;
    std::vector<std::thread> threads_; // grows only, up to most_threads
};

} // namespace

std::unique_ptr<Reader> make_pool_reader(unsigned threads, Files& files) {
    return std::make_unique<PoolReader>(threads, files);
}

} // namespace moetuner
