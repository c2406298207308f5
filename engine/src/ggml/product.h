// Products of tokens with experts: which rows go to which expert, and the work that ggml's
// threads do as a custom operation.
//
// Every number is computed as stock's MUL_MAT_ID computes it, by the same functions of the
// CPU backend on the same bytes; only the order of the work differs. Written by the builder
// before the graph runs; what threads write while it runs is atomic, relaxed: ggml's barrier
// after each node orders all that depends on it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cache/cache.h"
#include "ggml.h"
#include "ggml/cpu.h"
#include "ggml/weights.h"

namespace moetuner {

// One row of the right-hand side: its place in the token's list of experts, and its token.
struct Row {
    int32_t column;
    int32_t token;
};
static_assert(sizeof(Row) == 8, "the tiled kernel takes pairs of int32");

// The rows of each expert that is used: those of experts[i] are rows[begin[i]] to
// rows[begin[i + 1]], in ggml's order (token by token).
struct Routing {
    std::vector<uint32_t> experts; // in the order in which they are first named
    std::vector<uint32_t> begin;
    std::vector<Row> rows;

    // `ids`: computed. `count`: experts there are. Aborts on an id that is none, as ggml does.
    void read(const ggml_tensor& ids, uint32_t count);
};

// Memory that is used for one graph after another. Never shrinks.
class Scratch {
  public:
    // Not initialised, aligned to 64 bytes; until clear().
    std::byte* take(size_t bytes);
    void clear() { used_ = 0; }

  private:
    struct Free {
        void operator()(void* memory) const;
    };
    struct Block {
        size_t bytes = 0;
        std::unique_ptr<void, Free> memory;
    };
    std::vector<Block> blocks_;
    size_t used_ = 0;
};

// The right-hand side in the type that weights are multiplied with.
struct RightSide {
    const ggml_tensor* b = nullptr;
    ggml_type type = GGML_TYPE_COUNT;
    ggml_from_float_t from_float = nullptr; // null: b as it is
    size_t row_size = 0;
    std::byte* data = nullptr;

    // The share of thread `ith` of `nth`.
    void quantize(int ith, int nth) const;
    const std::byte* row(const Row& row) const;
};

struct Product {
    const ggml_tensor* node = nullptr;
    const Matrix* matrix = nullptr;
    const ggml_type_traits_cpu* traits = nullptr;
    const RightSide* right = nullptr;
    const Acquisition* units = nullptr; // as the parts'; for messages
    bool tiled = false;                 // its type is one that the tiled kernel takes
    std::atomic<bool> failed{false};
};

// What one expert contributes to one product.
struct Part {
    Product* product = nullptr;
    const Acquisition* units = nullptr;
    uint32_t entry = 0; // in `units`
    const Row* rows = nullptr;
    uint32_t count = 0;
};

// One custom operation: parts of one or more products that do not depend on each other.
class Task {
  public:
    Task(const Cpu& cpu, char* scratch) : cpu_(cpu), scratch_(scratch) {}

    // `ready`: its bytes are there. Those that are late come last.
    void add(const Part& part, bool ready);

    // All threads of the graph call it.
    void run(int ith, int nth);

  private:
    struct Phase {
        std::vector<Part> plain;
        std::vector<int64_t> end; // chunks up to and with each part of `plain`
        std::vector<Part> tiled;
        std::atomic<int64_t> next{0};
    };
    static void run_plain(Phase& phase);
    void run_tiled(const Phase& phase, int ith, int nth) const;

    const Cpu& cpu_;
    char* scratch_; // for the tiled kernel, all threads'
    Phase phases_[2];
};

} // namespace moetuner
