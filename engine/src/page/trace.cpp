#include "page/trace.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cache/clock.h"
#include "io/threads.h"
#include "page/page.h"

namespace moetuner {
namespace {

constexpr size_t write_at = 64 << 10;  // bytes that are worth a write
constexpr auto write_after = std::chrono::milliseconds(500); // what a crash may cost
constexpr size_t most_buffered = 16 << 20;
constexpr unsigned most_names = 10000;

bool exists_as_file(const std::string& path) {
    struct stat status {};
    return lstat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

// A new file: `path`, or the next of its numbers that is free. Its name goes to `file`.
int create(const std::string& path, std::string& file) {
    for (unsigned number = 0; number < most_names; ++number) {
        file = number == 0 ? path : path + "." + std::to_string(number);
        const int fd = open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd >= 0) {
            return fd;
        }
        const int error = errno;
        if (error != EEXIST) {
            throw TraceRefused("cannot record to " + file + ": " + std::strerror(error), error);
        }
        if (!exists_as_file(file)) {
            throw TraceRefused("cannot record to " + file + ": it exists, and is no file", error);
        }
    }
    throw TraceRefused("cannot record to " + path + ": it and its next " +
                           std::to_string(most_names - 1) + " numbers are taken",
                       EEXIST);
}

template <typename Number> Number at_most(int64_t value) {
    constexpr auto most = static_cast<int64_t>(static_cast<Number>(-1));
    return static_cast<Number>(std::clamp<int64_t>(value, 0, most));
}

} // namespace

Trace::Trace(const std::string& path, TraceModel model, Log log)
    : model_(std::move(model)), log_(std::move(log)), fd_(create(path, file_)),
      started_ns_(now_ns()) {
    try {
        buffer_.reserve(2 * write_at);
        thread_ = start_thread("moe-trace", [this] { run(); });
    } catch (const Error& error) {
        close(fd_);
        throw TraceRefused(error.what(), EAGAIN);
    }
}

Trace::~Trace() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    wake_.notify_one();
    thread_.join();
    close(fd_);
}

Trace::Status Trace::status() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return status_;
}

void Trace::add(const Choice& choice) {
    if (choice.rows == 0 || choice.used == 0) {
        return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (status_.error != 0) {
        return;
    }
    const bool was_empty = buffer_.empty();
    if (used_ == 0) {
        used_ = choice.used;
        row_bytes_ = sizeof(TraceRow) + 2 * used_;
        TraceHeader header{};
        header.magic = trace_magic;
        header.version = trace_version;
        header.header_bytes = sizeof header;
        header.row_bytes = static_cast<uint32_t>(row_bytes_);
        header.used = used_;
        header.experts = model_.experts;
        header.layers = model_.layers;
        timespec now{};
        clock_gettime(CLOCK_REALTIME, &now);
        header.started_ns = static_cast<uint64_t>(int64_t{now.tv_sec} * 1000000000 + now.tv_nsec -
                                                  (now_ns() - started_ns_));
        header.model_bytes = model_.bytes;
        put_text(header.commit, sizeof header.commit, model_.commit);
        put_text(header.model, sizeof header.model, model_.name);
        const auto* bytes = reinterpret_cast<const std::byte*>(&header);
        buffer_.assign(bytes, bytes + sizeof header);
    }
    // The numbers of a row are 16 bits wide; a file has rows of one size.
    const bool fits = choice.used == used_ && choice.rows <= UINT16_MAX;
    if (!fits || buffer_.size() + choice.rows * row_bytes_ > most_buffered) {
        status_.lost += choice.rows;
        return;
    }
    size_t at = buffer_.size();
    buffer_.resize(at + choice.rows * row_bytes_);
    TraceRow row{};
    row.evaluation = choice.evaluation;
    row.ms = at_most<uint32_t>((now_ns() - started_ns_) / 1000000);
    row.layer = at_most<uint16_t>(choice.layer);
    row.flags = choice.grouped ? trace_grouped : uint16_t{0};
    row.rows = static_cast<uint16_t>(choice.rows);
    const auto* ids = static_cast<const std::byte*>(choice.ids);
    for (uint32_t r = 0; r < choice.rows; ++r) {
        row.row = static_cast<uint16_t>(r);
        std::memcpy(&buffer_[at], &row, sizeof row);
        at += sizeof row;
        for (uint32_t k = 0; k < used_; ++k, at += 2) {
            int32_t id;
            std::memcpy(&id, ids + r * choice.row_stride + k * choice.column_stride, sizeof id);
            const auto narrow = at_most<uint16_t>(id);
            std::memcpy(&buffer_[at], &narrow, sizeof narrow);
        }
    }
    status_.rows += choice.rows;
    if (was_empty || buffer_.size() >= write_at) {
        wake_.notify_one();
    }
}

void Trace::run() {
    std::vector<std::byte> out;
    out.reserve(2 * write_at);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        wake_.wait(lock, [this] { return closing_ || !buffer_.empty(); });
        wake_.wait_for(lock, write_after,
                       [this] { return closing_ || buffer_.size() >= write_at; });
        if (buffer_.empty()) {
            return; // closing, and nothing is left
        }
        out.swap(buffer_);
        lock.unlock();
        const bool good = write_all(out);
        const int error = good ? 0 : errno;
        if (!good) {
            log_(LogLevel::warning, "the router trace ends here: cannot write " + file_ + ": " +
                                        std::strerror(error));
        }
        out.clear();
        if (out.capacity() > 1 << 20) { // after a burst
            out = {};
        }
        lock.lock();
        if (!good) {
            status_.error = error;
            buffer_.clear();
            buffer_.shrink_to_fit();
            return;
        }
    }
}

// False with errno; then the file ends with the last whole row.
bool Trace::write_all(const std::vector<std::byte>& data) {
    for (size_t done = 0; done < data.size();) {
        const ssize_t wrote = write(fd_, data.data() + done, data.size() - done);
        if (wrote > 0) {
            done += static_cast<size_t>(wrote);
            written_ += static_cast<uint64_t>(wrote);
        } else if (wrote == 0 || errno != EINTR) {
            const int error = wrote == 0 ? ENOSPC : errno;
            const uint64_t rows = written_ < trace_header_bytes
                                      ? 0
                                      : (written_ - trace_header_bytes) / row_bytes_;
            const uint64_t whole = written_ < trace_header_bytes
                                       ? 0
                                       : trace_header_bytes + rows * row_bytes_;
            // At worst a piece of a row stays.
            const int cut = ftruncate(fd_, static_cast<off_t>(whole));
            static_cast<void>(cut);
            errno = error;
            return false;
        }
    }
    return true;
}

} // namespace moetuner
