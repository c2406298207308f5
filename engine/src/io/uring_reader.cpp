#include "io/uring_reader.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <liburing.h>
#include <mutex>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

#include "io/threads.h"

namespace moetuner {
namespace {

constexpr unsigned ring_entries = 256; // the largest depth
constexpr unsigned batch = 32;         // attempts taken at a time
// Headers of Ubuntu 22.04 have no names for them.
constexpr unsigned single_issuer = 1U << 12;
constexpr unsigned defer_taskrun = 1U << 13;
constexpr uint64_t bell = ~0ULL;       // user data of the read that stop() completes

std::string reason(int error) { return std::strerror(error); }

// One reaper thread waits for completions and refills. Who submits what an acquisition has
// queued is an option: the acquiring thread itself, at once; or the reaper, woken for it.
class UringReader final : public Reader {
  public:
    UringReader(const ReaderOptions& options, Files& files, Log log)
        : files_(files), log_(std::move(log)), options_(options),
          depth_(std::clamp(options.depth, 1U, ring_entries)), attempts_(ring_entries) {
        const int result = create_ring();
        if (result < 0) {
            throw Error("io_uring is refused: " + reason(-result));
        }
        bell_fd_ = eventfd(0, EFD_CLOEXEC);
        io_uring_probe* probe = io_uring_get_probe_ring(&ring_);
        const bool reads =
            probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) != 0;
        io_uring_free_probe(probe);
        if (!reads || bell_fd_ < 0) {
            close_all();
            throw Error("io_uring has no plain reads on this kernel");
        }
        free_.reserve(ring_entries);
        for (unsigned i = ring_entries; i-- > 0;) {
            free_.push_back(i);
        }
    }

    ~UringReader() override {
        stop();
        close_all();
    }

    void start(Source& source, const std::vector<Memory>& memory) override {
        source_ = &source;
        register_files();
        register_buffers(memory);
        reaper_ = start_thread("moetuner-reap", [this] { reap(); });
    }

    void kick() noexcept override {
        if (options_.reaper_submits) {
            if (!told_.exchange(true, std::memory_order_acq_rel)) {
                ring_bell();
            }
            return;
        }
        if (fills_wanted_.fetch_add(1, std::memory_order_acq_rel) != 0) {
            return; // whoever fills will do it once more: nobody waits for its system call
        }
        unsigned seen = 1;
        for (;;) {
            fill();
            const unsigned before = fills_wanted_.fetch_sub(seen, std::memory_order_acq_rel);
            if (before == seen) {
                return;
            }
            seen = before - seen;
        }
    }

    void stop() noexcept override {
        if (!reaper_.joinable()) {
            return;
        }
        stopping_.store(true, std::memory_order_release);
        ring_bell();
        reaper_.join();
    }

    void set_depth(unsigned depth) noexcept override {
        depth_.store(std::clamp(depth, 1U, ring_entries), std::memory_order_relaxed);
    }

    unsigned depth() const noexcept override { return depth_.load(std::memory_order_relaxed); }
    unsigned max_depth() const noexcept override { return ring_entries; }

    std::string describe() const override {
        std::string text = "io_uring, depth " + std::to_string(depth());
        if (fixed_files_ || !buffers_.empty()) {
            text += ", registered ";
            text += !fixed_files_ ? "buffers" : buffers_.empty() ? "files" : "files and buffers";
        }
        return text;
    }

  private:
    // With one submitter the kernel can leave all work on completions to that thread's own
    // waiting (Linux 6.1): no other thread is interrupted for it.
    int create_ring() noexcept {
        if (options_.reaper_submits) {
            const unsigned one = IORING_SETUP_R_DISABLED | single_issuer | defer_taskrun;
            if (io_uring_queue_init(ring_entries, &ring_, one) == 0) {
                disabled_ = true; // the thread that enables it is the one that submits
                return 0;
            }
        }
        return io_uring_queue_init(ring_entries, &ring_, 0);
    }

    void ring_bell() const noexcept {
        const uint64_t one = 1;
        while (write(bell_fd_, &one, sizeof one) < 0 && errno == EINTR) {
        }
    }

    void close_all() noexcept {
        io_uring_queue_exit(&ring_);
        if (bell_fd_ >= 0) {
            close(bell_fd_);
        }
    }

    void say(LogLevel level, const std::string& text) const {
        if (log_) {
            log_(level, text);
        }
    }

    // Numbers: twice the file's for the buffered descriptor, one more for the direct one.
    void register_files() {
        if (!options_.register_files || files_.count() == 0) {
            return;
        }
        std::vector<int> descriptors;
        descriptors.reserve(size_t{2} * files_.count());
        for (uint32_t file = 0; file < files_.count(); ++file) {
            descriptors.push_back(files_.descriptor(file, false));
            descriptors.push_back(files_.descriptor(file, true)); // -1: an empty place
        }
        const int result = io_uring_register_files(&ring_, descriptors.data(),
                                                   static_cast<unsigned>(descriptors.size()));
        fixed_files_ = result == 0;
        if (!fixed_files_) {
            say(LogLevel::info, "io_uring: files are not registered (" + reason(-result) + ")");
        }
    }

    void register_buffers(const std::vector<Memory>& memory) {
        if (!options_.register_buffers || memory.empty()) {
            return;
        }
        std::vector<iovec> vectors;
        vectors.reserve(memory.size());
        for (const Memory& block : memory) {
            vectors.push_back({block.base, block.bytes});
        }
        const int result = io_uring_register_buffers(&ring_, vectors.data(),
                                                     static_cast<unsigned>(vectors.size()));
        if (result == 0) {
            buffers_ = memory;
            return;
        }
        say(LogLevel::info, "io_uring: buffers are not registered (" + reason(-result) +
                                (result == -ENOMEM ? ": see ulimit -l)" : ")"));
    }

    // Takes and submits until the depth is reached: who owns the submission queue.
    void fill() noexcept {
        if (bell_wanted_.exchange(false, std::memory_order_acq_rel)) {
            io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
            io_uring_prep_read(sqe, bell_fd_, &rung_, sizeof rung_, 0);
            sqe->user_data = bell;
            submit();
        }
        Attempt taken[batch];
        unsigned places[batch];
        for (;;) {
            const unsigned limit = depth_.load(std::memory_order_relaxed);
            const unsigned busy = in_flight();
            const size_t n = source_->take(taken, std::min(limit > busy ? limit - busy : 0, batch));
            if (n == 0) {
                return;
            }
            {
                const std::lock_guard<std::mutex> lock(mutex_);
                for (size_t i = 0; i < n; ++i) {
                    places[i] = free_.back();
                    free_.pop_back();
                    attempts_[places[i]] = taken[i];
                }
            }
            for (size_t i = 0; i < n; ++i) {
                prepare(taken[i], places[i]);
            }
            submit();
        }
    }

    unsigned in_flight() const noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        return ring_entries - static_cast<unsigned>(free_.size());
    }

    void prepare(const Attempt& attempt, unsigned place) noexcept {
        // Never null: submit() empties the queue, and a batch is smaller than it.
        io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
        const int descriptor = fixed_files_
                                   ? static_cast<int>(2 * attempt.file + (attempt.direct ? 1 : 0))
                                   : files_.descriptor(attempt.file, attempt.direct);
        const int buffer = buffer_of(attempt);
        if (buffer >= 0) {
            io_uring_prep_read_fixed(sqe, descriptor, attempt.target, attempt.length,
                                     attempt.offset, buffer);
        } else {
            io_uring_prep_read(sqe, descriptor, attempt.target, attempt.length, attempt.offset);
        }
        if (fixed_files_) {
            sqe->flags |= IOSQE_FIXED_FILE;
        }
        sqe->user_data = place;
    }

    int buffer_of(const Attempt& attempt) const noexcept {
        for (size_t i = 0; i < buffers_.size(); ++i) {
            const Memory& block = buffers_[i];
            if (attempt.target >= block.base &&
                attempt.target + attempt.length <= block.base + block.bytes) {
                return static_cast<int>(i);
            }
        }
        return -1;
    }

    // The kernel may take a part, or nothing while it is short of something. What it has
    // not taken stays in the ring, so asking again is all there is to do: without an
    // answer a read would never end.
    void submit() noexcept {
        while (io_uring_sq_ready(&ring_) > 0) {
            const int result = io_uring_submit(&ring_);
            if (result > 0 || result == -EINTR) {
                continue;
            }
            if (result < 0 && !complained_) {
                complained_ = true;
                say(LogLevel::warning, "io_uring: submission is refused for now (" +
                                           reason(-result) + "): trying again");
            }
            pause();
        }
    }

    static void pause() noexcept {
        const timespec millisecond{0, 1000000};
        nanosleep(&millisecond, nullptr);
    }

    // The reaper's: a fill, and the bell armed if it is not.
    void refill() noexcept {
        if (!options_.reaper_submits) {
            kick();
            return;
        }
        told_.exchange(false, std::memory_order_acq_rel); // before the work is looked for
        fill();
    }

    void reap() noexcept {
        if (disabled_) {
            syscall(SYS_io_uring_register, ring_.ring_fd, IORING_REGISTER_ENABLE_RINGS, nullptr, 0);
        }
        bell_wanted_.store(true, std::memory_order_release);
        refill();
        for (;;) {
            io_uring_cqe* first = nullptr;
            const int waited = io_uring_wait_cqe(&ring_, &first);
            if (waited < 0) {
                if (waited != -EINTR && waited != -EAGAIN) {
                    pause();
                }
                continue;
            }
            Attempt finished[batch];
            int64_t results[batch];
            const unsigned n = collect(finished, results);
            for (unsigned i = 0; i < n; ++i) {
                source_->done(finished[i], results[i]);
            }
            if (!stopping_.load(std::memory_order_acquire)) {
                refill();
            } else if (in_flight() == 0) {
                return;
            }
        }
    }

    // Takes what has completed out of the ring, `batch` at most.
    unsigned collect(Attempt* finished, int64_t* results) noexcept {
        io_uring_cqe* cqes[batch];
        const unsigned there = io_uring_peek_batch_cqe(&ring_, cqes, batch);
        unsigned n = 0;
        bool rung = false;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (unsigned i = 0; i < there; ++i) {
                if (cqes[i]->user_data == bell) {
                    rung = true;
                    continue;
                }
                const auto place = static_cast<unsigned>(cqes[i]->user_data);
                finished[n] = attempts_[place];
                results[n++] = cqes[i]->res;
                free_.push_back(place);
            }
        }
        io_uring_cq_advance(&ring_, there);
        if (rung) {
            bell_wanted_.store(true, std::memory_order_release); // the next fill arms it again
        }
        return n;
    }

    Files& files_;
    const Log log_;
    const ReaderOptions options_;
    Source* source_ = nullptr;
    bool fixed_files_ = false;    // this and the next are fixed before the reaper starts
    std::vector<Memory> buffers_; // empty: not registered
    std::atomic<unsigned> depth_;
    std::atomic<bool> stopping_{false}; // release by stop(), acquire by the reaper
    bool disabled_ = false; // the ring, until the reaper enables it
    // The reaper has been told of new work and has not looked for it yet.
    std::atomic<bool> told_{false};

    // Calls of kick() that no fill() has answered yet. Who raises it from 0 owns the
    // submission queue until it lowers it to 0 again; acquire and release hand both the
    // queue and the knowledge of new work from thread to thread.
    std::atomic<unsigned> fills_wanted_{0};
    io_uring ring_{};         // its completion queue is the reaper's
    bool complained_ = false; // the queue's owner
    std::atomic<bool> bell_wanted_{false};

    int bell_fd_ = -1;
    uint64_t rung_ = 0; // written by the kernel
    std::thread reaper_;

    mutable std::mutex mutex_;      // guards what follows; never held during a system call
    std::vector<Attempt> attempts_; // those under way, by place
    std::vector<unsigned> free_;    // places
};

} // namespace

std::unique_ptr<Reader> make_uring_reader(const ReaderOptions& options, Files& files,
                                          const Log& log) {
    return std::make_unique<UringReader>(options, files, log);
}

} // namespace moetuner
