// Runs a split of ggml's graph: products with experts from the cache, everything else as the
// CPU backend does it.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "cache/cache.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "ggml/cpu.h"
#include "ggml/product.h"
#include "ggml/weights.h"

namespace moetuner {

// Finds the weights that a matrix belongs to: (weights, matrix), or nulls.
struct Found {
    Weights* weights = nullptr;
    const Matrix* matrix = nullptr;
};
using Finder = std::function<Found(const ggml_tensor& weights)>;

// One for each context of llama.cpp. compute() is called by one thread at a time; the
// products run on the threads of a second instance of the CPU backend, so there is no pool
// of our own beside ggml's.
//
// A graph of the split's nodes is collected, with custom operations in place of the
// products, and run as a whole: when the split ends, or earlier if units must be released.
class Computer {
  public:
    // Throws Error.
    Computer(const Cpu& cpu, Finder finder, Log log);
    ~Computer();
    Computer(const Computer&) = delete;
    Computer& operator=(const Computer&) = delete;

    CpuBackend& cpu() { return backend_; }

    // llama.cpp's -t. The shared page may ask for another number.
    void set_threads(int threads);

    // GGML_STATUS_FAILED when an expert could not be read: its text was logged, and no
    // result of the graph may be used. Throws Error when there can be no cache.
    ggml_status compute(ggml_cgraph* graph);

  private:
    struct Run;

    Run take_run(ggml_cgraph* graph, int begin) const;
    void multiply(const Run& run);
    void announce(const Run& run);
    void multiply_in_rounds(const Run& run, Cache& cache, const std::vector<uint32_t>& units);
    void acquire(const Run& run, Cache& cache, const std::vector<uint32_t>& units);
    void add_task(const Run& run, const Acquisition& units, const std::vector<uint32_t>& places);
    const RightSide& right_side(const ggml_tensor& b, ggml_type type);
    void add_custom(ggml_custom_op_t function, void* data);
    void add_node(ggml_tensor* node);
    bool flush();
    void forget();
    void release();
    void read_ahead(const Run& run, Cache& cache, size_t experts_used);

    const Cpu& cpu_;
    const Finder finder_;
    const Log log_;
    CpuBackend backend_;
    int given_threads_ = GGML_DEFAULT_N_THREADS;

    struct FreeContext {
        void operator()(ggml_context* context) const { ggml_free(context); }
    };
    std::unique_ptr<ggml_context, FreeContext> graph_context_;
    std::unique_ptr<ggml_context, FreeContext> node_context_; // emptied with the graph
    ggml_cgraph* pending_;
    ggml_status status_ = GGML_STATUS_SUCCESS;

    // Of pending_. Deques: others point into them.
    std::deque<Product> products_;
    std::deque<RightSide> rights_;
    std::deque<Task> tasks_;
    Scratch scratch_;

    // The layer whose units are pinned: its products share one acquisition. The ids are
    // compared by address, so this never outlives one call of compute().
    const ggml_tensor* pinned_ids_ = nullptr;
    uint32_t pinned_first_ = 0;
    unsigned pinned_slice_ = 0; // from this on
    Cache* pinned_cache_ = nullptr;
    Acquisition pinned_;
    Routing routing_; // of pinned_ids_, or of the rounds under way

    Course course_;
    Monitor* monitor_ = nullptr; // of what this call of compute() has announced
};

} // namespace moetuner
