#include "ggml/weights.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <sched.h>
#include <sstream>
#include <tuple>
#include <unistd.h>

#include "cache/hot_list.h"
#include "cache/layout.h"
#include "ggml/memory.h"
#include "ggml/names.h"
#include "ggml/resident.h"

namespace moetuner {
namespace {

constexpr uint64_t smallest_block = 4096; // Files::block() is at least this

std::string mib(uint64_t bytes) {
    const double value = static_cast<double>(bytes) / (1 << 20);
    std::ostringstream out;
    out.precision(value < 100 ? 1 : 0);
    out << std::fixed << value;
    return out.str();
}

bool same_as_file(int fd, uint64_t at, const std::byte* loaded, uint64_t bytes) {
    std::vector<std::byte> read(bytes);
    return pread(fd, read.data(), bytes, static_cast<off_t>(at)) ==
               static_cast<ssize_t>(bytes) &&
           std::memcmp(read.data(), loaded, bytes) == 0;
}

} // namespace

Weights::Weights(Settings settings, Log log) : settings_(std::move(settings)), log_(std::move(log)) {
}

Weights::~Weights() {
    if (cache_ && !settings_.hot_list.empty()) {
        std::string error;
        if (!save_hot_list(settings_.hot_list, total_bytes(), cache_->unit_count(), cache_->hot(),
                           error)) {
            log_(LogLevel::warning, "hot list not saved: " + error);
        }
    }
}

bool Weights::is_expert(const char* name, const Settings& settings) {
    return parse_expert_name(name).has_value() &&
           (settings.tensors.empty() || std::strstr(name, settings.tensors.c_str()) != nullptr);
}

bool Weights::lacks(const char* name, const FilePlace& place) {
    const std::lock_guard<std::mutex> guard(mutex_);
    return !cache_ && base_ == without_part(place.file->name) &&
           std::none_of(matrices_.begin(), matrices_.end(),
                        [name](const Matrix& matrix) { return matrix.name == name; });
}

void Weights::add(const ggml_tensor& tensor, const FilePlace& place) {
    const auto name = parse_expert_name(tensor.name);
    if (!name) {
        throw Error("it is not an expert matrix");
    }
    Matrix matrix;
    matrix.name = tensor.name;
    matrix.layer = name->layer;
    matrix.grouped = name->grouped;
    matrix.order = name->order;
    matrix.experts = static_cast<uint32_t>(tensor.ne[2]);
    matrix.expert_bytes = tensor.nb[2];
    matrix.address = tensor.data;
    matrix.bytes = ggml_nbytes(&tensor);
    matrix.place = place;
    const std::lock_guard<std::mutex> guard(mutex_);
    if (cache_) {
        throw Error("it arrived after the model was in use");
    }
    base_ = without_part(place.file->name);
    by_address_[matrix.address] = matrices_.size();
    matrices_.push_back(std::move(matrix));
}

void Weights::check(const void* address, const void* loaded, uint64_t offset, uint64_t bytes) {
    constexpr uint64_t samples = 16;
    constexpr uint64_t sample_bytes = 256;
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = by_address_.find(address);
    if (found == by_address_.end() || bytes == 0) {
        return;
    }
    Matrix& matrix = matrices_[found->second];
    const uint64_t length = std::min(bytes, sample_bytes);
    for (uint64_t i = 0; i < samples; ++i) {
        const uint64_t begin = (bytes - length) * i / (samples - 1); // the first and the last too
        if (!same_as_file(matrix.place.file->fd, matrix.place.offset + offset + begin,
                          static_cast<const std::byte*>(loaded) + begin, length)) {
            matrix.wrong = true;
        }
    }
}

const Matrix* Weights::find(const void* address) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = by_address_.find(address);
    return found == by_address_.end() ? nullptr : &matrices_[found->second];
}

uint64_t Weights::total_bytes() const {
    uint64_t total = 0;
    for (const Matrix& matrix : matrices_) {
        total += matrix.bytes;
    }
    return total;
}

std::set<int> Weights::descriptors() {
    const std::lock_guard<std::mutex> guard(mutex_);
    std::set<int> all;
    for (const Matrix& matrix : matrices_) {
        all.insert(matrix.place.file->fd);
    }
    for (uint32_t file = 0; files_ && file < files_->count(); ++file) {
        all.insert(files_->descriptor(file, false));
        all.insert(files_->descriptor(file, true));
    }
    return all;
}

void Weights::require_budget() {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (const Matrix& matrix : matrices_) {
        if (matrix.wrong) {
            throw Error(matrix.name + " was not loaded from " + matrix.place.file->name);
        }
    }
    if (cache_ || matrices_.empty()) {
        return;
    }
    try {
        plan_layout(number_units().units, budget(available_memory(), 0), smallest_block,
                    settings_.piece);
    } catch (const Error& error) {
        throw Error((settings_.cache_bytes != 0
                         ? "MOETUNER_CACHE_MIB=" + std::to_string(settings_.cache_bytes >> 20)
                         : std::string("MOETUNER_CACHE_MIB is not set")) +
                    ": " + error.what());
    }
}

void Weights::judge_size(uint32_t experts_used) {
    if (judged_.exchange(true, std::memory_order_relaxed)) {
        return;
    }
    const std::lock_guard<std::mutex> guard(mutex_);
    uint64_t units = 0;
    uint64_t bytes = 0;
    std::set<std::pair<int, bool>> layers;
    for (const Matrix& matrix : matrices_) {
        bytes += experts_used * matrix.expert_bytes;
        units += layers.emplace(matrix.layer, matrix.grouped).second ? experts_used : 0;
    }
    const uint32_t slots = cache_->shape().slots;
    if (slots < units) {
        log_(LogLevel::warning, "the cache holds " + std::to_string(slots) +
                                    " experts, but one token uses " + std::to_string(units) + " (" +
                                    mib(bytes) + " MiB): it will have next to none of them; a "
                                    "larger MOETUNER_CACHE_MIB would help");
    }
}

Cache& Weights::cache() {
    {
        const std::lock_guard<std::mutex> guard(mutex_);
        if (cache_) {
            return *cache_;
        }
    }
    require_budget();
    const std::lock_guard<std::mutex> guard(mutex_);
    if (cache_) {
        return *cache_;
    }
    Numbered numbered = number_units();
    auto files = std::make_unique<Files>(log_, settings_.direct);
    std::map<const OpenFile*, uint32_t> known;
    for (const Matrix& matrix : matrices_) { // in the order of UnitSpec's file numbers
        const OpenFile& file = *matrix.place.file;
        if (known.emplace(&file, files->count()).second) {
            files->add("/proc/self/fd/" + std::to_string(file.fd), file.name);
        }
    }
    const uint64_t available = available_memory(); // before any of it is locked
    const uint64_t dense_bytes = settings_.keep_dense ? keep_dense_resident() : 0;
    CacheOptions options;
    options.budget = budget(available, dense_bytes);
    options.piece = settings_.piece;
    options.lock = settings_.lock;
    options.hugepages = settings_.hugepages;
    options.spin_ns = settings_.spin_us * 1000;
    auto cache = std::make_unique<Cache>(std::move(numbered.units), options, *files,
                                         make_reader(settings_.reader, *files, log_), log_);
    for (size_t i = 0; i < matrices_.size(); ++i) {
        matrices_[i].slice = numbered.places[i].slice;
        matrices_[i].first = numbered.places[i].first;
        matrices_[i].group = numbered.places[i].group;
    }
    files_ = std::move(files);
    cache_ = std::move(cache);
    monitor_ = make_monitor(std::move(numbered.layers));
    report(*cache_, available, dense_bytes);
    if (!settings_.hot_list.empty()) {
        std::vector<uint32_t> hot;
        std::string error;
        if (load_hot_list(settings_.hot_list, total_bytes(), cache_->unit_count(), hot, error)) {
            log_(LogLevel::info, "warming " + std::to_string(cache_->warm(hot)) + " units");
        } else {
            log_(LogLevel::info, "not warmed: " + error);
        }
    }
    return *cache_;
}

// The lock is held.
Weights::Numbered Weights::number_units() const {
    std::map<const OpenFile*, uint32_t> files;
    // One group for each layer and set of experts, its matrices in the order of use.
    std::map<std::tuple<int, bool, uint32_t>, std::map<int, size_t>> groups;
    for (size_t i = 0; i < matrices_.size(); ++i) {
        const Matrix& matrix = matrices_[i];
        files.emplace(matrix.place.file.get(), static_cast<uint32_t>(files.size()));
        auto& group = groups[{matrix.layer, matrix.grouped, matrix.experts}];
        if (!group.emplace(matrix.order, i).second) {
            throw Error(matrix.name + " is there twice");
        }
    }
    Numbered numbered;
    numbered.places.resize(matrices_.size());
    uint32_t layer = 0;
    for (const auto& [key, group] : groups) {
        const auto first = static_cast<uint32_t>(numbered.units.size());
        const uint32_t experts = std::get<2>(key);
        for (uint32_t e = 0; e < experts; ++e) {
            UnitSpec unit;
            unit.layer = layer;
            for (const auto& [order, index] : group) {
                const Matrix& matrix = matrices_[index];
                unit.slices.push_back({files.at(matrix.place.file.get()),
                                       matrix.place.offset + e * matrix.expert_bytes,
                                       matrix.expert_bytes});
            }
            numbered.units.push_back(std::move(unit));
        }
        unsigned slice = 0;
        for (const auto& [order, index] : group) {
            numbered.places[index] = {slice++, first, layer};
        }
        numbered.layers.push_back(static_cast<uint32_t>(std::get<0>(key)));
        ++layer;
    }
    return numbered;
}

std::unique_ptr<Monitor> Weights::make_monitor(std::vector<uint32_t> layers) {
    MonitorOptions options;
    options.page = settings_.page;
    options.trace_file = settings_.trace;
    options.model.name = matrices_.front().place.file->name;
    options.model.commit = MOETUNER_GGML_COMMIT;
    options.model.bytes = total_bytes();
    options.model.layers = static_cast<uint32_t>(layers.size());
    for (const Matrix& matrix : matrices_) {
        options.model.experts = std::max(options.model.experts, matrix.experts);
    }
    options.layers = std::move(layers);
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) == 0) {
        options.most_threads = static_cast<unsigned>(CPU_COUNT(&cores));
    }
    return std::make_unique<Monitor>(*cache_, std::move(options), log_);
}

// Half of what is free leaves room for the context and the page cache. Whoever measures sets
// MOETUNER_CACHE_MIB.
uint64_t Weights::budget(uint64_t available, uint64_t dense_bytes) const {
    if (settings_.cache_bytes != 0) {
        return settings_.cache_bytes;
    }
    return available > dense_bytes ? (available - dense_bytes) / 2 : 0;
}

// Bytes of dense weights in the page cache.
uint64_t Weights::keep_dense_resident() {
    std::vector<MappedRange> experts;
    for (const Matrix& matrix : matrices_) {
        experts.push_back({matrix.address, matrix.bytes, matrix.place});
    }
    const Residency residency = make_dense_resident(experts, settings_.lock);
    if (residency.lock_errno != 0) {
        log_(LogLevel::warning,
             "only " + mib(residency.locked_bytes) + " of " + mib(residency.dense_bytes) +
                 " MiB of dense weights are locked in memory (" +
                 std::strerror(residency.lock_errno) +
                 "): under memory pressure every token may read them again; raise "
                 "RLIMIT_MEMLOCK (ulimit -l)");
    }
    return residency.dense_bytes;
}

void Weights::report(const Cache& cache, uint64_t available, uint64_t dense_bytes) const {
    const CacheShape shape = cache.shape();
    std::string text = "expert cache for " + base_ + ": " + std::to_string(shape.slots) + " of " +
                       std::to_string(shape.units) + " units, " + mib(shape.arena_bytes) + " of " +
                       mib(total_bytes()) + " MiB";
    if (settings_.cache_bytes == 0) {
        text += " (half of the free memory: MOETUNER_CACHE_MIB is not set)";
    }
    text += "; " + cache.describe_reader();
    if (dense_bytes != 0) {
        text += "; " + mib(dense_bytes) + " MiB of dense weights kept in memory";
    }
    log_(LogLevel::info, text);
    if (shape.arena_bytes + dense_bytes > available) {
        log_(LogLevel::warning,
             "the cache of " + mib(shape.arena_bytes) + " MiB and the dense weights of " +
                 mib(dense_bytes) + " MiB are more than the free memory of " + mib(available) +
                 " MiB: the system may swap, or end the program; a smaller MOETUNER_CACHE_MIB "
                 "would help");
    }
    if (shape.lock_errno != 0) {
        log_(LogLevel::warning, "only " + mib(shape.locked_bytes) + " of " +
                                    mib(shape.arena_bytes) + " MiB of the cache are locked (" +
                                    std::strerror(shape.lock_errno) +
                                    "): under memory pressure it may be swapped; raise "
                                    "RLIMIT_MEMLOCK (ulimit -l)");
    }
}

} // namespace moetuner
