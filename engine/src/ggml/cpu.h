// What is used of the CPU backend that the program has loaded: a second instance of it, its
// dot products and, where it has one, its kernel for many rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

struct ggml_compute_params; // ggml-cpu-impl.h

namespace moetuner {

struct Cpu {
    ggml_backend_dev_t device = nullptr;
    const ggml_type_traits_cpu* (*traits)(ggml_type) = nullptr;
    bool openmp = true; // threads are OpenMP's, shared by all instances

    // The tiled kernel for one expert (ggml-cpu/tiled/tiled.h); null in a llama.cpp without
    // it. `tiled_scratch` gives 0 for products that it does not take.
    size_t (*tiled_scratch)(int threads, ggml_tensor* node) = nullptr;
    bool (*tiled)(const ggml_compute_params*, ggml_tensor* node, int64_t expert, int64_t count,
                  const int32_t* rows, char* scratch) = nullptr;
    // It is taken from this many rows on.
    size_t tiled_rows = 8;

    // Throws Error when there is none, or it hides what is needed.
    static Cpu find();
};

// A second instance of the CPU backend: one graph at a time, on ggml's own threads.
class CpuBackend {
  public:
    // Throws Error.
    explicit CpuBackend(const Cpu& cpu);
    ~CpuBackend();
    CpuBackend(const CpuBackend&) = delete;
    CpuBackend& operator=(const CpuBackend&) = delete;

    void set_threads(int threads);
    int threads() const { return threads_; }
    void set_abort(ggml_abort_callback callback, void* data);
    ggml_status compute(ggml_cgraph* graph) { return ggml_backend_graph_compute(backend_, graph); }

  private:
    template <typename Function> Function function(const char* name) const;

    const Cpu& cpu_;
    ggml_backend_t backend_;
    int threads_ = GGML_DEFAULT_N_THREADS;
    ggml_threadpool_t pool_ = nullptr;
    int pool_threads_ = 0;
};

} // namespace moetuner
