#include "ggml/computer.h"

#include <algorithm>
#include <numeric>

namespace moetuner {
namespace {

// A split has some ten nodes, each layer at most four of our own beside them.
constexpr size_t max_nodes = 1024;
// With this many tokens nearly every expert of the next layer will be used.
constexpr int64_t read_ahead_tokens = 32;

ggml_context* new_context(size_t bytes) {
    ggml_init_params parameters{};
    parameters.mem_size = bytes;
    parameters.no_alloc = true;
    ggml_context* context = ggml_init(parameters);
    if (context == nullptr) {
        throw Error("no memory for the graphs of the expert cache");
    }
    return context;
}

bool does_nothing(const ggml_tensor& node) {
    return node.op == GGML_OP_NONE || node.op == GGML_OP_VIEW || node.op == GGML_OP_RESHAPE ||
           node.op == GGML_OP_PERMUTE || node.op == GGML_OP_TRANSPOSE;
}

} // namespace

// Products that follow each other in the graph and differ only in their weights (gate, up).
// Nothing becomes free between them, so the result of the second cannot lie where the first
// still reads, and they can be computed as one operation.
struct Computer::Run {
    Weights* weights = nullptr;
    std::vector<ggml_tensor*> nodes;
    std::vector<const Matrix*> matrices;
    Slices slices; // from the least to the greatest

    const ggml_tensor& ids() const { return *nodes.front()->src[2]; }
    const Matrix& matrix() const { return *matrices.front(); }
};

Computer::Computer(const Cpu& cpu, Finder finder, Log log)
    : cpu_(cpu), finder_(std::move(finder)), log_(std::move(log)), backend_(cpu),
      graph_context_(new_context(ggml_graph_overhead_custom(max_nodes, false))),
      node_context_(new_context(max_nodes * ggml_tensor_overhead())),
      pending_(ggml_new_graph_custom(graph_context_.get(), max_nodes, false)) {}

Computer::~Computer() {
    release();
}

ggml_status Computer::compute(ggml_cgraph* graph) {
    // Whatever happens, nothing of this graph is left for the next one.
    struct Cleanup {
        Computer& computer;
        ~Cleanup() {
            computer.forget();
            computer.release();
            computer.monitor_ = nullptr;
        }
    } cleanup{*this};
    status_ = GGML_STATUS_SUCCESS;
    const int count = ggml_graph_n_nodes(graph);
    for (int i = 0; i < count && status_ == GGML_STATUS_SUCCESS;) {
        const Run run = take_run(graph, i);
        if (!run.nodes.empty()) {
            multiply(run);
            i += static_cast<int>(run.nodes.size());
            continue;
        }
        ggml_tensor* node = ggml_graph_node(graph, i++);
        if (!does_nothing(*node)) {
            add_node(node);
        }
    }
    flush();
    if (monitor_ != nullptr && status_ != GGML_STATUS_ABORTED) {
        monitor_->end(course_, status_ != GGML_STATUS_SUCCESS);
    }
    return status_;
}

void Computer::set_threads(int threads) {
    given_threads_ = threads; // taken at the next product
}

Computer::Run Computer::take_run(ggml_cgraph* graph, int begin) const {
    Run run;
    for (int i = begin; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor* node = ggml_graph_node(graph, i);
        if (node->op != GGML_OP_MUL_MAT_ID) {
            break;
        }
        const Found found = finder_(*node->src[0]);
        if (found.matrix == nullptr) {
            break;
        }
        if (!run.nodes.empty() &&
            (node->src[1] != run.nodes[0]->src[1] || node->src[2] != run.nodes[0]->src[2] ||
             found.weights != run.weights || !found.matrix->same_experts(run.matrix()))) {
            break;
        }
        run.weights = found.weights;
        run.nodes.push_back(node);
        run.matrices.push_back(found.matrix);
    }
    return run;
}

void Computer::multiply(const Run& found) {
    Cache& cache = found.weights->cache(); // units are numbered from here on
    Run run = found;
    run.slices = {max_slices, 0};
    for (const Matrix* matrix : run.matrices) {
        run.slices.first = std::min(run.slices.first, matrix->slice);
        run.slices.end = std::max(run.slices.end, matrix->slice + 1);
    }
    const bool same_layer = pinned_cache_ == &cache && pinned_ids_ == &run.ids() &&
                            pinned_first_ == run.matrix().first &&
                            pinned_slice_ <= run.slices.first;
    if (!same_layer) {
        if (!flush()) { // the ids may be among what is pending
            return;
        }
        release();
        // Between graphs: scratch memory is for a number of threads.
        monitor_ = &run.weights->monitor();
        backend_.set_threads(
            static_cast<int>(monitor_->begin(static_cast<unsigned>(given_threads_))));
        routing_.read(run.ids(), run.matrix().experts);
        announce(run);
        std::vector<uint32_t> units;
        for (const uint32_t expert : routing_.experts) {
            units.push_back(run.matrix().first + expert);
        }
        if (units.empty()) {
            return;
        }
        // All of them: the warm-up run.
        if (run.ids().ne[1] == 1 && units.size() < run.matrix().experts) {
            run.weights->judge_size(static_cast<uint32_t>(units.size()));
        }
        if (units.size() <= cache.slots_for(units.front())) {
            acquire(run, cache, units);
        }
        if (pinned_cache_ == nullptr) {
            multiply_in_rounds(run, cache, units);
            return;
        }
    }
    std::vector<uint32_t> places(pinned_.size());
    std::iota(places.begin(), places.end(), 0U);
    add_task(run, pinned_, places);
}

void Computer::announce(const Run& run) {
    const ggml_tensor& ids = run.ids();
    Operation operation;
    operation.group = run.matrix().group;
    operation.slices = (1U << run.slices.end) - (1U << run.slices.first);
    operation.everything = ids.ne[0] >= run.matrix().experts;
    operation.choice.grouped = run.matrix().grouped;
    operation.choice.ids = ids.data;
    operation.choice.row_stride = ids.nb[1];
    operation.choice.column_stride = ids.nb[0];
    operation.choice.rows = static_cast<uint32_t>(ids.ne[1]);
    operation.choice.used = static_cast<uint32_t>(ids.ne[0]);
    monitor_->operation(course_, operation);
}

void Computer::acquire(const Run& run, Cache& cache, const std::vector<uint32_t>& units) {
    pinned_ = cache.acquire(units.data(), units.size(), {run.slices.first});
    if (!pinned_.rest().empty()) { // other contexts hold slots
        cache.release(pinned_);
        return;
    }
    pinned_cache_ = &cache;
    pinned_ids_ = &run.ids();
    pinned_first_ = run.matrix().first;
    pinned_slice_ = run.slices.first;
    if (run.ids().ne[1] >= read_ahead_tokens) {
        read_ahead(run, cache, units.size());
    }
}

void Computer::multiply_in_rounds(const Run& run, Cache& cache,
                                  const std::vector<uint32_t>& units) {
    std::vector<uint32_t> left(units.size()); // places in `units`
    std::iota(left.begin(), left.end(), 0U);
    while (!left.empty()) {
        std::vector<uint32_t> wanted;
        for (const uint32_t place : left) {
            wanted.push_back(units[place]);
        }
        Acquisition round = cache.acquire(wanted.data(), wanted.size(), run.slices);
        std::vector<uint32_t> places;
        for (size_t i = 0; i < round.size(); ++i) {
            places.push_back(left[round.position(i)]);
        }
        std::vector<uint32_t> rest;
        for (const uint32_t position : round.rest()) {
            rest.push_back(left[position]);
        }
        add_task(run, round, places);
        if (!flush()) {
            return;
        }
        cache.release(round);
        left = std::move(rest);
    }
}

// `places`: for each unit of the acquisition, where its expert is in routing_.
void Computer::add_task(const Run& run, const Acquisition& units,
                        const std::vector<uint32_t>& places) {
    const ggml_tensor& b = *run.nodes.front()->src[1];
    size_t scratch = 0;
    std::vector<Product*> products;
    for (size_t k = 0; k < run.nodes.size(); ++k) {
        ggml_tensor* node = run.nodes[k];
        Product& product = products_.emplace_back();
        product.node = node;
        product.matrix = run.matrices[k];
        product.traits = cpu_.traits(node->src[0]->type);
        product.right = &right_side(b, product.traits->vec_dot_type);
        product.units = &units;
        if (cpu_.tiled_scratch != nullptr && product.right->from_float != nullptr) {
            const size_t bytes = cpu_.tiled_scratch(backend_.threads(), node);
            product.tiled = bytes > 0;
            scratch = std::max(scratch, bytes);
        }
        products.push_back(&product);
    }
    Task& task = tasks_.emplace_back(
        cpu_, scratch > 0 ? reinterpret_cast<char*>(scratch_.take(scratch)) : nullptr);
    // What is ready of gate, then of up; then what is late of gate, then of up.
    std::vector<uint32_t> order(units.size());
    for (Product* product : products) {
        const size_t ready = units.ready_first(product->matrix->slice, order.data());
        for (size_t i = 0; i < order.size(); ++i) {
            const uint32_t place = places[order[i]];
            const uint32_t begin = routing_.begin[place];
            task.add({product, &units, order[i], &routing_.rows[begin],
                      routing_.begin[place + 1] - begin},
                     i < ready);
        }
    }
    add_custom([](ggml_tensor*, int ith, int nth,
                  void* data) { static_cast<Task*>(data)->run(ith, nth); },
               &task);
}

// gate and up have the same right-hand side: it is quantised once.
const RightSide& Computer::right_side(const ggml_tensor& b, ggml_type type) {
    for (const RightSide& known : rights_) {
        if (known.b == &b && known.type == type) {
            return known;
        }
    }
    RightSide& right = rights_.emplace_back();
    right.b = &b;
    right.type = type;
    if (type != b.type) {
        right.from_float = cpu_.traits(type)->from_float;
        right.row_size = ggml_row_size(type, b.ne[0]);
        right.data = scratch_.take(right.row_size * static_cast<size_t>(b.ne[1] * b.ne[2]));
        add_custom([](ggml_tensor*, int ith, int nth,
                      void* data) { static_cast<RightSide*>(data)->quantize(ith, nth); },
                   &right);
    }
    return right;
}

void Computer::add_custom(ggml_custom_op_t function, void* data) {
    ggml_tensor* node = ggml_custom_4d(node_context_.get(), GGML_TYPE_I8, 1, 1, 1, 1, nullptr, 0,
                                       function, GGML_N_TASKS_MAX, data);
    node->flags |= GGML_TENSOR_FLAG_COMPUTE;
    add_node(node);
}

void Computer::add_node(ggml_tensor* node) {
    GGML_ASSERT(ggml_graph_n_nodes(pending_) < static_cast<int>(max_nodes));
    ggml_graph_add_node(pending_, node);
}

// Runs what is pending. False: the graph has failed.
bool Computer::flush() {
    if (status_ == GGML_STATUS_SUCCESS && ggml_graph_n_nodes(pending_) > 0) {
        status_ = backend_.compute(pending_);
    }
    for (const Product& product : products_) {
        if (status_ != GGML_STATUS_SUCCESS || !product.failed.load(std::memory_order_relaxed)) {
            continue;
        }
        status_ = GGML_STATUS_FAILED;
        for (size_t i = 0; i < product.units->size(); ++i) {
            const std::string error = product.units->error(i, product.matrix->slice);
            if (!error.empty()) {
                log_(LogLevel::error, product.matrix->name + ": " + error);
                break;
            }
        }
    }
    forget();
    return status_ == GGML_STATUS_SUCCESS;
}

void Computer::forget() {
    ggml_graph_clear(pending_);
    ggml_reset(node_context_.get());
    tasks_.clear();
    products_.clear();
    rights_.clear();
    scratch_.clear();
}

void Computer::read_ahead(const Run& run, Cache& cache, size_t experts_used) {
    // Only if nearly all experts are used: then the next layer's will be too.
    if (experts_used * 2 < run.matrix().experts) {
        return;
    }
    std::vector<uint32_t> next;
    const uint32_t begin = run.matrix().first + run.matrix().experts;
    for (uint32_t e = 0; e < run.matrix().experts && begin + e < cache.unit_count(); ++e) {
        next.push_back(begin + e);
    }
    cache.prefetch(next.data(), next.size());
}

void Computer::release() {
    if (pinned_cache_ != nullptr) {
        pinned_cache_->release(pinned_);
    }
    pinned_cache_ = nullptr;
    pinned_ids_ = nullptr;
}

} // namespace moetuner
