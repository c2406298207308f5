// What is told of a cache and what it is told: the shared page, the wishes in it, the trace.
//
// There is no thread for the page. Those who compute publish: when a graph has reached its
// last layer, and every page_interval_ns while one runs, so that the figures of an engine
// that is idle are its last ones. A publication takes some microseconds.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cache/cache.h"
#include "io/log.h"
#include "page/page.h"
#include "page/trace.h"

namespace moetuner {

constexpr int64_t page_interval_ns = 100'000'000;

struct MonitorOptions {
    bool page = true;       // whether there is one
    std::string trace_file; // to record to from the start; empty: none
    TraceModel model;
    std::vector<uint32_t> layers; // the model's number of each UnitSpec::layer
    unsigned most_threads = 1;    // that may be asked for, if -t does not give more
};

// Where a context is in its graphs. One for each, handed to its calls.
struct Course {
    bool begun = false;
    uint32_t group = 0;  // of the last operation
    uint32_t slices = 0; // of this layer, that had their turn in this graph; a bit each
    uint32_t evaluation = 0;
    bool counted = false; // as one that is over
};

// Products of a layer that share their experts and are computed together.
struct Operation {
    uint32_t group = 0;      // UnitSpec::layer
    uint32_t slices = 1;     // of the units: a bit each
    bool everything = false; // all experts for all rows: the warm-up run
    Choice choice;           // layer and evaluation are filled in
};

class Monitor {
  public:
    // Whatever is refused (page, trace) is one warning, and goes without. The cache must
    // outlive it.
    Monitor(Cache& cache, MonitorOptions options, Log log);
    ~Monitor(); // publishes that it ends
    Monitor(const Monitor&) = delete;
    Monitor& operator=(const Monitor&) = delete;

    // Any thread. Obeys the page. Returns how many threads shall compute, if llama.cpp says
    // `given`.
    unsigned begin(unsigned given);

    // Any thread, after begin(): what is computed next. Counts it, and records it if a trace
    // is on and the router had a choice.
    void operation(Course& course, Operation operation);

    // Any thread: what was announced last by `course` is computed, or not.
    void end(Course& course, bool failed);

    const Page* page() const { return page_.get(); } // null: there is none

  private:
    void obey();
    void record_to(const std::string& file);
    void publish(PageState state, int64_t now);

    Cache& cache_;
    const MonitorOptions options_;
    const Log log_;
    const unsigned usual_depth_;
    std::unique_ptr<Page> page_;

    // Relaxed, all of them: they order nothing.
    std::atomic<uint32_t> seen_{0}; // PageControl::generation
    std::atomic<uint32_t> wanted_threads_{0};
    std::atomic<uint32_t> threads_{0};
    std::atomic<uint32_t> given_{0};
    std::atomic<bool> tracing_{false};
    std::atomic<int64_t> next_publication_ns_{0};
    std::atomic<uint32_t> next_evaluation_{0};
    std::atomic<uint64_t> operations_{0};
    std::atomic<uint64_t> evaluations_{0}; // over
    std::atomic<uint64_t> tokens_{0};
    std::atomic<uint64_t> failed_{0};

    std::mutex mutex_; // guards what follows, and publishing
    Wishes wishes_;    // that are in force
    std::unique_ptr<Trace> trace_;
    int trace_errno_ = 0; // why there is none although one was asked for
};

} // namespace moetuner
