// Runs a split of ggml's graph: products with experts from the cache, everything else as the
// CPU backend does it.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cache/cache.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "ggml/weights.h"

namespace moetuner {

// What is used of the CPU backend that the program has loaded.
struct Cpu {
    ggml_backend_dev_t device = nullptr;
    const ggml_type_traits_cpu* (*traits)(ggml_type) = nullptr;

    // Throws Error when there is none.
    static Cpu find();
};

// Finds the weights that a matrix belongs to: (weights, matrix), or nulls.
struct Found {
    Weights* weights = nullptr;
    const Matrix* matrix = nullptr;
};
using Finder = std::function<Found(const ggml_tensor& weights)>;

// One for each context of llama.cpp. compute() is called by one thread at a time; the
// products run on the threads of a second instance of the CPU backend, so there is no pool
// of our own beside ggml's.
class Computer {
  public:
    Computer(const Cpu& cpu, Finder finder, Log log);
    ~Computer();
    Computer(const Computer&) = delete;
    Computer& operator=(const Computer&) = delete;

    void set_threads(int threads);

    // GGML_STATUS_FAILED when an expert could not be read: its text was logged, and no
    // result of the graph may be used.
    ggml_status compute(ggml_cgraph* graph);

  private:
    struct Product;
    struct Gathered;

    void multiply(ggml_tensor* node, const Found& found);
    void multiply_in_rounds(ggml_tensor* node, const Found& found, const Product& whole,
                            const std::vector<uint32_t>& units);
    static void take(Product& product, std::vector<Gathered>& experts);
    void add_product(std::unique_ptr<Product> product);
    void delegate(Product& product, Gathered& expert);
    int32_t* zeros(size_t count);
    void add_custom(ggml_custom_op_t function, void* task);
    void add_node(ggml_tensor* node);
    bool flush();
    void release();
    void read_ahead(const Found& found, size_t experts_used);

    const Cpu cpu_;
    const Finder finder_;
    const Log log_;
    ggml_backend_t backend_;
    ggml_context* context_;
    ggml_cgraph* pending_ = nullptr;
    size_t nodes_ = 0; // in pending_
    bool failed_ = false;

    std::vector<std::unique_ptr<Product>> products_; // of pending_
    std::deque<std::vector<int32_t>> zeros_;         // ids of products with one expert

    // The layer whose units are pinned: its products share one acquisition.
    const ggml_tensor* pinned_ids_ = nullptr;
    uint32_t pinned_first_ = 0;
    Cache* pinned_cache_ = nullptr;
    Acquisition pinned_;
};

} // namespace moetuner
