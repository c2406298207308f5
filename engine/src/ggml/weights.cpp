#include "ggml/weights.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <tuple>

#include "cache/hot_list.h"
#include "ggml/resident.h"

namespace moetuner {
namespace {

constexpr double mib = 1024.0 * 1024.0;

struct Name {
    int layer;
    std::string kind; // gate, up, down, gate_up
    bool grouped;     // the second set of experts that some models have (chexps)
};

bool parse(const char* text, Name& name) {
    static const std::regex pattern(
        R"(blk\.(\d{1,5})\.ffn_(gate|up|down|gate_up)_(ch)?exps\.weight)");
    std::cmatch match;
    if (!std::regex_match(text, match, pattern)) {
        return false;
    }
    name = {std::atoi(match[1].str().c_str()), match[2].str(), match[3].matched};
    return true;
}

// The order in which ggml runs a layer's products: it visits SwiGLU's gate first, although
// the graph names up first.
int rank(const std::string& kind) {
    return kind == "gate" || kind == "gate_up" ? 0 : kind == "up" ? 1 : 2;
}

std::string base_of(const std::string& path) {
    static const std::regex part(R"(-\d{5}-of-\d{5}\.gguf$)");
    return std::regex_replace(path, part, "");
}

uint64_t available_memory() {
    std::ifstream file("/proc/meminfo");
    std::string word;
    uint64_t kib = 0;
    while (file >> word) {
        if (word == "MemAvailable:" && file >> kib) {
            return kib << 10;
        }
    }
    return 0;
}

std::string text_of(double value) {
    std::ostringstream out;
    out.precision(value < 100 ? 1 : 0);
    out << std::fixed << value;
    return out.str();
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
    Name parsed;
    return parse(name, parsed) &&
           (settings.tensors.empty() || std::strstr(name, settings.tensors.c_str()) != nullptr);
}

bool Weights::lacks(const char* name, const FilePlace& place) {
    const std::lock_guard<std::mutex> guard(mutex_);
    return !cache_ && base_ == base_of(place.file->name) &&
           std::none_of(matrices_.begin(), matrices_.end(),
                        [name](const Matrix& matrix) { return matrix.name == name; });
}

void Weights::add(const ggml_tensor& tensor, const FilePlace& place) {
    Name name;
    if (!parse(tensor.name, name)) {
        throw Error(std::string(tensor.name) + " is not an expert matrix");
    }
    Matrix matrix;
    matrix.name = tensor.name;
    matrix.layer = name.layer;
    matrix.experts = static_cast<uint32_t>(tensor.ne[2]);
    matrix.expert_bytes = tensor.nb[2];
    matrix.address = tensor.data;
    matrix.bytes = ggml_nbytes(&tensor);
    matrix.place = place;
    const std::lock_guard<std::mutex> guard(mutex_);
    if (cache_) {
        throw Error(matrix.name + " arrived after the model was in use");
    }
    base_ = base_of(place.file->name);
    by_address_[matrix.address] = matrices_.size();
    matrices_.push_back(std::move(matrix));
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

Cache& Weights::cache() {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (cache_) {
        return *cache_;
    }
    files_ = std::make_unique<Files>(log_, settings_.direct);
    number_units();
    CacheOptions options;
    options.budget = settings_.cache_bytes;
    if (options.budget == 0) {
        // Half of what is free now leaves room for the context and the page cache. Whoever
        // measures sets MOETUNER_CACHE_MIB.
        options.budget = available_memory() / 2;
    }
    options.piece = settings_.piece;
    options.lock = settings_.lock;
    options.hugepages = settings_.hugepages;
    options.spin_ns = settings_.spin_us * 1000;
    if (settings_.keep_dense) {
        keep_dense_resident();
    }
    cache_ = std::make_unique<Cache>(units_, options, *files_,
                                     make_reader(settings_.reader, *files_, log_), log_);
    report(*cache_);
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

void Weights::number_units() {
    // One group for each layer and set of experts, its matrices in the order of use.
    std::map<std::tuple<int, bool, uint32_t>, std::map<int, size_t>> groups;
    for (size_t i = 0; i < matrices_.size(); ++i) {
        Name name;
        parse(matrices_[i].name.c_str(), name);
        auto& group = groups[{name.layer, name.grouped, matrices_[i].experts}];
        if (!group.emplace(rank(name.kind), i).second) {
            throw Error(matrices_[i].name + " is there twice");
        }
    }
    std::map<std::string, uint32_t> numbers;
    uint32_t layer = 0;
    for (auto& [key, group] : groups) {
        const auto first = static_cast<uint32_t>(units_.size());
        const uint32_t experts = std::get<2>(key);
        for (uint32_t e = 0; e < experts; ++e) {
            UnitSpec unit;
            unit.layer = layer;
            for (const auto& [order, index] : group) {
                const Matrix& matrix = matrices_[index];
                auto known = numbers.find(matrix.place.file->name);
                if (known == numbers.end()) {
                    const uint32_t number =
                        files_->add("/proc/self/fd/" + std::to_string(matrix.place.file->fd),
                                    matrix.place.file->name);
                    known = numbers.emplace(matrix.place.file->name, number).first;
                }
                unit.slices.push_back({known->second, matrix.place.offset + e * matrix.expert_bytes,
                                       matrix.expert_bytes});
            }
            units_.push_back(std::move(unit));
        }
        unsigned slice = 0;
        for (const auto& [order, index] : group) {
            matrices_[index].first = first;
            matrices_[index].slice = slice++;
        }
        ++layer;
    }
}

void Weights::keep_dense_resident() {
    std::vector<MappedRange> experts;
    for (const Matrix& matrix : matrices_) {
        experts.push_back({matrix.address, matrix.bytes, matrix.place});
    }
    const Residency residency = make_dense_resident(experts, settings_.lock);
    if (residency.dense_bytes == 0) {
        return;
    }
    std::string text = "dense weights: " + text_of(static_cast<double>(residency.dense_bytes) / mib) +
                       " MiB kept in memory";
    if (residency.locked_bytes < residency.dense_bytes && settings_.lock) {
        text += ", " + text_of(static_cast<double>(residency.locked_bytes) / mib) +
                " MiB of it locked (" + std::strerror(residency.lock_errno) +
                "; raise RLIMIT_MEMLOCK)";
    }
    log_(residency.lock_errno != 0 ? LogLevel::warning : LogLevel::info, text);
}

void Weights::report(const Cache& cache) const {
    const CacheShape shape = cache.shape();
    std::string text = "expert cache: " + std::to_string(shape.slots) + " of " +
                       std::to_string(shape.units) + " units, " +
                       text_of(static_cast<double>(shape.arena_bytes) / mib) + " of " +
                       text_of(static_cast<double>(total_bytes()) / mib) + " MiB, " +
                       cache.describe_reader();
    log_(LogLevel::info, text);
    if (settings_.cache_bytes == 0) {
        log_(LogLevel::info, "MOETUNER_CACHE_MIB is not set: half of the free memory is used");
    }
}

} // namespace moetuner
