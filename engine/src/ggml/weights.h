// The expert matrices in our buffers: where each lies in which file, and the cache of their
// units. One Weights for each model in the process.
//
// Threads. llama.cpp loads a model in one thread and computes with it in others after that:
// add() is called before the first find() of the same model. A mutex guards the tables
// between models; the cache is made at most once, at the first product.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache/cache.h"
#include "ggml.h"
#include "ggml/mapping.h"
#include "ggml/settings.h"
#include "io/files.h"
#include "page/monitor.h"

namespace moetuner {

// One matrix of all experts of a layer.
struct Matrix {
    std::string name;
    int layer = 0;       // of the model
    bool grouped = false; // chexps
    int order = 0;       // ExpertName::order
    unsigned slice = 0;  // of the units, in that order; set with the cache
    uint32_t first = 0;  // unit of expert 0; expert e is first + e; set with the cache
    uint32_t group = 0;  // UnitSpec::layer; set with the cache
    uint32_t experts = 0;
    uint64_t expert_bytes = 0; // nb[2]
    const void* address = nullptr;
    uint64_t bytes = 0;
    bool wrong = false;  // what was loaded is not what the file has at `place`
    FilePlace place;     // of the whole matrix

    // Whether its experts and those of another matrix of the model are the same units.
    bool same_experts(const Matrix& other) const {
        return layer == other.layer && grouped == other.grouped && experts == other.experts;
    }
};

class Weights {
  public:
    Weights(Settings settings, Log log);
    ~Weights();
    Weights(const Weights&) = delete;
    Weights& operator=(const Weights&) = delete;

    // Whether a tensor of this name is an expert matrix that the cache can hold.
    static bool is_expert(const char* name, const Settings& settings);

    // Whether the model is still being loaded, from this file or another part of the same
    // split model, and has no matrix of this name yet.
    bool lacks(const char* name, const FilePlace& place);

    // The loader placed a matrix; its bytes are `place` of the file. Throws Error.
    void add(const ggml_tensor& tensor, const FilePlace& place);

    // The loader read [offset, offset + bytes) of the matrix itself: looks whether that is
    // what lies in the file, at a few places. If not, cache() refuses.
    void check(const void* address, const void* loaded, uint64_t offset, uint64_t bytes);

    // The matrix at this address; null if it is none of ours.
    const Matrix* find(const void* address);

    // Made at the first call. Throws Error (no budget, memory refused, …).
    Cache& cache();
    // After cache().
    Monitor& monitor() { return *monitor_; }

    // A token uses so many experts of a layer. Warns, once, if the cache is too small to hold
    // what one token uses: an LRU of that size never has what comes next.
    void judge_size(uint32_t experts_used);

    // Throws Error if cache() surely would: wrong bytes, or a budget that holds no unit.
    void require_budget();

    uint64_t total_bytes() const;
    std::set<int> descriptors(); // all that this model has open

  private:
    struct Numbered {
        std::vector<UnitSpec> units;
        struct Place {
            unsigned slice;
            uint32_t first;
            uint32_t group;
        };
        std::vector<Place> places;    // by matrix
        std::vector<uint32_t> layers; // the model's, by group
    };
    Numbered number_units() const;
    uint64_t budget(uint64_t available, uint64_t dense_bytes) const;
    uint64_t keep_dense_resident();
    void report(const Cache& cache, uint64_t available, uint64_t dense_bytes) const;
    std::unique_ptr<Monitor> make_monitor(std::vector<uint32_t> layers);

    const Settings settings_;
    const Log log_;
    std::mutex mutex_;
    std::string base_; // the files' common name, without -00001-of-00003.gguf
    std::vector<Matrix> matrices_;
    std::unordered_map<const void*, size_t> by_address_;
    std::unique_ptr<Files> files_;
    std::unique_ptr<Cache> cache_;
    std::unique_ptr<Monitor> monitor_; // made and gone with the cache
    std::atomic<bool> judged_{false};
};

} // namespace moetuner
