#include "page/monitor.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "cache/clock.h"

namespace moetuner {

Monitor::Monitor(Cache& cache, MonitorOptions options, Log log)
    : cache_(cache), options_(std::move(options)), log_(std::move(log)),
      usual_depth_(cache.depth()) {
    if (options_.page) {
        try {
            page_ = std::make_unique<Page>(options_.model.name, options_.model.commit,
                                           static_cast<uint32_t>(options_.layers.size()));
        } catch (const Error& error) {
            log_(LogLevel::warning, std::string("no page with figures: ") + error.what());
        }
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!options_.trace_file.empty()) {
        record_to(options_.trace_file);
    }
    publish(PageState::running, now_ns());
}

Monitor::~Monitor() {
    const std::lock_guard<std::mutex> lock(mutex_);
    trace_.reset();
    publish(PageState::ended, now_ns());
}

unsigned Monitor::begin(unsigned given) {
    if (page_ && page_->generation() != seen_.load(std::memory_order_relaxed)) {
        const std::lock_guard<std::mutex> lock(mutex_);
        obey();
    }
    const unsigned wanted = wanted_threads_.load(std::memory_order_relaxed);
    const unsigned threads =
        wanted == 0 ? given : std::clamp(wanted, 1U, std::max(given, options_.most_threads));
    given_.store(given, std::memory_order_relaxed);
    threads_.store(threads, std::memory_order_relaxed);
    return threads;
}

void Monitor::operation(Course& course, Operation operation) {
    constexpr auto relaxed = std::memory_order_relaxed;
    operations_.fetch_add(1, relaxed);
    // Each matrix of a layer has one turn in a graph, and layers come in their order.
    const bool same_layer = course.begun && operation.group == course.group &&
                            (operation.slices & course.slices) == 0;
    course.slices = operation.slices | (same_layer ? course.slices : 0);
    if (same_layer) {
        return;
    }
    if (operation.group == 0) {
        tokens_.fetch_add(operation.choice.rows, relaxed);
    }
    if (!course.begun || operation.group <= course.group) {
        course.begun = true;
        course.counted = false;
        course.evaluation = next_evaluation_.fetch_add(1, relaxed);
    }
    course.group = operation.group;
    if (operation.everything || !tracing_.load(relaxed)) {
        return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (trace_) {
        operation.choice.layer = options_.layers[operation.group];
        operation.choice.evaluation = course.evaluation;
        trace_->add(operation.choice);
    }
}

void Monitor::end(Course& course, bool failed) {
    const bool over = course.begun && course.group + 1 == options_.layers.size();
    if (failed) {
        failed_.fetch_add(1, std::memory_order_relaxed);
    } else if (over && !std::exchange(course.counted, true)) {
        evaluations_.fetch_add(1, std::memory_order_relaxed);
    }
    if (!page_) {
        return;
    }
    const int64_t now = now_ns();
    if (failed || over || now >= next_publication_ns_.load(std::memory_order_relaxed)) {
        const std::lock_guard<std::mutex> lock(mutex_);
        publish(failed ? PageState::failed : PageState::running, now);
    }
}

// The lock is held.
void Monitor::obey() {
    const std::optional<Wishes> found = page_->wishes();
    if (!found) {
        return;
    }
    if (found->depth != wishes_.depth) {
        cache_.set_depth(found->depth != 0 ? found->depth : usual_depth_);
    }
    wanted_threads_.store(found->threads, std::memory_order_relaxed);
    if (found->trace_request != wishes_.trace_request) {
        if (found->trace_on) {
            record_to(found->trace_file);
        } else {
            trace_.reset();
            trace_errno_ = 0;
            tracing_.store(false, std::memory_order_relaxed);
        }
    }
    wishes_ = *found;
    seen_.store(found->generation, std::memory_order_relaxed);
}

// The lock is held.
void Monitor::record_to(const std::string& file) {
    trace_.reset();
    trace_errno_ = 0;
    try {
        trace_ = std::make_unique<Trace>(file, options_.model, log_);
        log_(LogLevel::info, "recording the router's choices to " + trace_->file());
    } catch (const TraceRefused& error) {
        trace_errno_ = error.code;
        log_(LogLevel::warning, std::string("no router trace: ") + error.what());
    }
    tracing_.store(trace_ != nullptr, std::memory_order_relaxed);
}

// The lock is held.
void Monitor::publish(PageState state, int64_t now) {
    if (!page_) {
        return;
    }
    constexpr auto relaxed = std::memory_order_relaxed;
    next_publication_ns_.store(now + page_interval_ns, relaxed);
    const std::vector<LayerStats> by_layer = cache_.layer_stats();
    const CacheStats stats = cache_.stats();
    const CacheShape shape = cache_.shape();
    PageFigures figures{};
    std::vector<PageLayer> layers;
    layers.reserve(options_.layers.size());
    for (size_t i = 0; i < std::min(by_layer.size(), options_.layers.size()); ++i) {
        const LayerStats& layer = by_layer[i];
        layers.push_back({options_.layers[i], layer.hits, layer.joined, layer.misses, layer.bytes,
                          layer.waits, layer.wait_ns, layer.evictions});
        figures.hits += layer.hits;
        figures.joined += layer.joined;
        figures.misses += layer.misses;
        figures.bytes += layer.bytes;
        figures.waits += layer.waits;
        figures.wait_ns += layer.wait_ns;
        figures.evictions += layer.evictions;
    }
    figures.state = static_cast<uint64_t>(state);
    figures.published_ns = static_cast<uint64_t>(now);
    figures.operations = operations_.load(relaxed);
    figures.evaluations = evaluations_.load(relaxed);
    figures.tokens = tokens_.load(relaxed);
    figures.failed = failed_.load(relaxed);
    figures.applied = seen_.load(relaxed);
    figures.threads = threads_.load(relaxed);
    figures.threads_given = given_.load(relaxed);
    figures.depth = cache_.depth();
    figures.depth_max = cache_.max_depth();
    figures.budget = shape.budget;
    figures.arena_bytes = shape.arena_bytes;
    figures.peak_bytes = shape.peak_bytes;
    figures.locked_bytes = shape.locked_bytes;
    figures.lock_errno = static_cast<uint64_t>(shape.lock_errno);
    figures.units = shape.units;
    figures.slots = shape.slots;
    figures.used_slots = shape.used_slots;
    figures.block = shape.block;
    figures.rounds = stats.rounds;
    figures.blocked = stats.blocked;
    figures.prefetched = stats.prefetched;
    figures.prefetch_used = stats.prefetch_used;
    figures.prefetch_dropped = stats.prefetch_dropped;
    figures.reads = stats.reads;
    figures.retries = stats.retries;
    figures.buffered = stats.buffered;
    figures.failures = stats.failures;
    figures.in_flight = stats.in_flight;
    figures.in_flight_high = stats.in_flight_high;
    figures.queued = stats.queued;
    figures.queued_high = stats.queued_high;
    figures.model_bytes = options_.model.bytes;
    figures.experts = options_.model.experts;
    std::copy(stats.latency.begin(), stats.latency.end(), figures.latency);
    figures.trace_state = static_cast<uint64_t>(trace_errno_ != 0 ? TraceState::broken
                                                                  : TraceState::off);
    figures.trace_errno = static_cast<uint64_t>(trace_errno_);
    if (trace_) {
        const Trace::Status trace = trace_->status();
        figures.trace_state = static_cast<uint64_t>(trace.error != 0 ? TraceState::broken
                                                                     : TraceState::on);
        figures.trace_rows = trace.rows;
        figures.trace_lost = trace.lost;
        figures.trace_errno = static_cast<uint64_t>(trace.error);
        put_text(figures.trace_file, sizeof figures.trace_file, trace_->file());
    }
    page_->publish(figures, layers);
}

} // namespace moetuner
