#include "support.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <stdexcept>
#include <unistd.h>

#include "cache/layout.h"
#include "io/pool_reader.h"

namespace support {
namespace {

// Eight bytes at a time.
uint64_t word_at(uint64_t seed, uint64_t number) {
    uint64_t z = (number + 1) * 0x9e3779b97f4a7c15ULL + seed;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

void fill(std::byte* target, uint64_t seed, uint64_t offset, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes;) {
        const uint64_t word = word_at(seed, (offset + i) / 8);
        const uint64_t within = (offset + i) % 8;
        const uint64_t length = std::min(8 - within, bytes - i);
        std::memcpy(target + i, reinterpret_cast<const std::byte*>(&word) + within, length);
        i += length;
    }
}

} // namespace

std::byte byte_at(uint64_t seed, uint64_t offset) {
    std::byte byte{};
    fill(&byte, seed, offset, 1);
    return byte;
}

Directory::Directory(const std::string& below) {
    const char* temporary = std::getenv("TMPDIR");
    path_ = !below.empty() ? below : temporary != nullptr ? temporary : "/tmp";
    path_ += "/moetuner-core-XXXXXX";
    if (mkdtemp(path_.data()) == nullptr) {
        throw std::runtime_error("no directory " + path_ + ": " + std::strerror(errno));
    }
}

Directory::~Directory() { std::filesystem::remove_all(path_); }

void write_pattern(const std::string& path, uint64_t seed, uint64_t bytes) {
    std::FILE* file = std::fopen(path.c_str(), "wb");
    std::vector<std::byte> buffer(1 << 20);
    bool good = file != nullptr;
    for (uint64_t offset = 0; good && offset < bytes; offset += buffer.size()) {
        const uint64_t length = std::min<uint64_t>(buffer.size(), bytes - offset);
        fill(buffer.data(), seed, offset, length);
        good = std::fwrite(buffer.data(), 1, length, file) == length;
    }
    good = good && std::fflush(file) == 0 && fsync(fileno(file)) == 0;
    if (!good || std::fclose(file) != 0) {
        throw std::runtime_error("cannot write " + path + ": " + std::strerror(errno));
    }
}

uint64_t wrong_bytes(const void* data, uint64_t seed, uint64_t offset, uint64_t bytes) {
    std::vector<std::byte> expected(bytes);
    fill(expected.data(), seed, offset, bytes);
    if (std::memcmp(expected.data(), data, bytes) == 0) {
        return 0;
    }
    const auto* got = static_cast<const std::byte*>(data);
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < bytes; ++i) {
        wrong += got[i] != expected[i] ? 1 : 0;
    }
    return wrong;
}

Log Said::log() {
    return [this](LogLevel level, const std::string& text) {
        const std::lock_guard<std::mutex> lock(mutex_);
        lines_.push_back({level, text});
    };
}

size_t Said::count(LogLevel level) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<size_t>(std::count_if(
        lines_.begin(), lines_.end(), [&](const Line& line) { return line.level == level; }));
}

bool Said::contains(const std::string& part) const { return all().find(part) != std::string::npos; }

std::string Said::all() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string text;
    for (const Line& line : lines_) {
        text += line.text + "\n";
    }
    return text;
}

Model make_model(uint32_t layers, uint32_t experts, const std::vector<uint64_t>& slice_bytes,
                 uint32_t file) {
    Model model;
    model.units.resize(size_t{layers} * experts);
    uint64_t offset = 1184; // a header
    for (uint32_t layer = 0; layer < layers; ++layer) {
        for (const uint64_t bytes : slice_bytes) {
            offset = moetuner::round_up(offset, 32);
            for (uint32_t expert = 0; expert < experts; ++expert) {
                UnitSpec& unit = model.units[size_t{layer} * experts + expert];
                unit.layer = layer;
                unit.slices.push_back({file, offset, bytes});
                offset += bytes;
            }
            offset += 96; // a norm between the tensors
        }
    }
    model.file_bytes = offset;
    return model;
}

namespace {

std::string written(const Directory& directory, const Model& model) {
    const std::string path = directory.path("model.gguf");
    write_pattern(path, rig_seed, model.file_bytes);
    return path;
}

} // namespace

Rig::Rig(Model given, bool allow_direct, const std::string& below)
    : directory(below), model(std::move(given)), files(said.log(), allow_direct) {
    files.add(written(directory, model), "model.gguf");
}

uint64_t Rig::budget(uint64_t slots) const {
    uint64_t largest = 0;
    for (const UnitSpec& unit : model.units) {
        largest = std::max(largest, moetuner::slot_bytes(unit, files.block()));
    }
    return largest * slots;
}

std::unique_ptr<Cache> Rig::cache(std::unique_ptr<Reader> reader, CacheOptions options) {
    return std::make_unique<Cache>(model.units, options, files, std::move(reader), said.log());
}

bool Rig::right(uint32_t unit, unsigned slice, const void* data) const {
    const Extent& extent = model.units[unit].slices[slice];
    return wrong_bytes(data, rig_seed, extent.offset, extent.bytes) == 0;
}

std::unique_ptr<Reader> pool(Files& files, unsigned threads) {
    return moetuner::make_pool_reader(threads, files);
}

std::vector<ReaderCase> readers() {
    std::vector<ReaderCase> all{{"pool", [](Files& files, const Log&) { return pool(files); }}};
    if (built_with_uring()) {
        all.push_back({"io_uring", [](Files& files, const Log& log) {
                           ReaderOptions options;
                           options.kind = ReaderKind::uring;
                           return make_reader(options, files, log);
                       }});
        all.push_back(
            {"io_uring, registered buffers, no registered files", [](Files& files, const Log& log) {
                 ReaderOptions options;
                 options.kind = ReaderKind::uring;
                 options.register_buffers = true;
                 options.register_files = false;
                 return make_reader(options, files, log);
             }});
    }
    return all;
}

void ManualReader::kick() noexcept {
    for (;;) {
        const std::lock_guard<std::mutex> lock(mutex_);
        Attempt attempt{};
        if (under_way_.size() >= depth_ || source_->take(&attempt, 1) == 0) {
            return;
        }
        under_way_.push_back(attempt);
    }
}

void ManualReader::stop() noexcept {
    for (;;) {
        Attempt attempt{};
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (under_way_.empty()) {
                return;
            }
            attempt = under_way_.back();
            under_way_.pop_back();
        }
        fill(attempt.target, seed_, attempt.offset, attempt.length);
        source_->done(attempt, attempt.length);
    }
}

std::vector<Attempt> ManualReader::taken() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return under_way_;
}

Attempt ManualReader::remove(size_t index) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Attempt attempt = under_way_.at(index);
    under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(index));
    return attempt;
}

void ManualReader::complete(size_t index) {
    const Attempt attempt = remove(index);
    fill(attempt.target, seed_, attempt.offset, attempt.length);
    source_->done(attempt, attempt.length);
    kick();
}

void ManualReader::complete(size_t index, int64_t result) {
    const Attempt attempt = remove(index);
    if (result > 0) {
        fill(attempt.target, seed_, attempt.offset, static_cast<uint64_t>(result));
    }
    source_->done(attempt, result);
    kick();
}

void ManualReader::complete_all() {
    while (!taken().empty()) {
        complete(0);
    }
}

} // namespace support
