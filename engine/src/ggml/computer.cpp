#include "ggml/computer.h"

#include <algorithm>
#include <cstring>
#include <dlfcn.h>
#include <numeric>

#include "ggml-backend-impl.h"

namespace moetuner {
namespace {

// Stock takes its tiled kernel (x86, some types) from this many rows of an expert on, and
// plain dot products below (ggml-cpu: tiled.h). From here on we let stock do it.
constexpr size_t delegate_rows = 8;
constexpr int64_t chunk_rows = 64; // rows of a matrix that a thread takes at a time
constexpr size_t max_nodes = 8192;
// With this many tokens nearly every expert of the next layer will be used.
constexpr int64_t read_ahead_tokens = 32;

// One row of the right-hand side: its place in the ids (column) and its token.
struct Row {
    int32_t column;
    int32_t token;
};

} // namespace

Cpu Cpu::find() {
    Cpu cpu;
    cpu.device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (cpu.device == nullptr) {
        throw Error("no CPU backend is loaded");
    }
    // Not linked: a program may have loaded one of several builds of it. The library is the
    // one that holds the device's own functions.
    Dl_info info{};
    void* inside = reinterpret_cast<void*>(cpu.device->iface.get_name);
    void* library = dladdr(inside, &info) != 0 ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD)
                                               : nullptr;
    void* symbol = library != nullptr ? dlsym(library, "ggml_get_type_traits_cpu") : nullptr;
    if (symbol == nullptr) {
        throw Error("the CPU backend has no ggml_get_type_traits_cpu");
    }
    cpu.traits = reinterpret_cast<const ggml_type_traits_cpu* (*)(ggml_type)>(symbol);
    return cpu;
}

// The rows of one expert.
struct Computer::Gathered {
    Product* product = nullptr;
    size_t entry = 0; // in the acquisition
    std::vector<Row> rows;
    std::shared_ptr<float[]> memory; // of input and output
    float* input = nullptr;          // delegated: rows of the right-hand side, one after another
    float* output = nullptr;         // and the result's

    void gather(int ith, int nth);
    void scatter(int ith, int nth) const;
};

// One product, or the part of it that a round has units for. Lives until it was computed.
// Written by the builder before the graph runs; `next` and `failed` also by the threads
// that run it, relaxed: ggml's barrier after each node orders all that depends on them.
struct Computer::Product {
    const ggml_tensor* node = nullptr;
    const Matrix* matrix = nullptr;
    const Acquisition* units = nullptr;
    const ggml_type_traits_cpu* traits = nullptr;
    ggml_from_float_t from_float = nullptr; // null: the right-hand side is used as it is
    size_t row_size = 0;                    // of the right-hand side as it is multiplied
    std::vector<std::byte> quantized;
    std::vector<Gathered> plain;
    std::vector<Gathered> delegated;
    int64_t chunks = 0; // of one expert
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};

    const ggml_tensor* right() const { return node->src[1]; }

    const std::byte* column(const Row& row) const {
        const ggml_tensor* b = right();
        const int64_t i11 = row.column % b->ne[1];
        if (from_float != nullptr) {
            return quantized.data() +
                   static_cast<size_t>(i11 + row.token * b->ne[1]) * row_size;
        }
        return raw(row);
    }

    const std::byte* raw(const Row& row) const {
        const ggml_tensor* b = right();
        const int64_t i11 = row.column % b->ne[1];
        return static_cast<const std::byte*>(b->data) + static_cast<size_t>(i11) * b->nb[1] +
               static_cast<size_t>(row.token) * b->nb[2];
    }

    float* result(const Row& row) const {
        return reinterpret_cast<float*>(static_cast<std::byte*>(node->data) +
                                        static_cast<size_t>(row.column) * node->nb[1] +
                                        static_cast<size_t>(row.token) * node->nb[2]);
    }

    // Stock splits each row between the threads at blocks; the result is the same, because
    // blocks are quantised independently.
    void quantize(int ith, int nth) {
        const ggml_tensor* b = right();
        const int64_t rows = b->ne[1] * b->ne[2];
        const int64_t from = rows * ith / nth;
        const int64_t to = rows * (ith + 1) / nth;
        if (rows >= nth) {
            for (int64_t r = from; r < to; ++r) {
                quantize(r, 0, b->ne[0]);
            }
            return;
        }
        const int64_t block = ggml_blck_size(traits->vec_dot_type);
        const int64_t blocks = b->ne[0] / block;
        const int64_t begin = blocks * ith / nth * block;
        const int64_t end = blocks * (ith + 1) / nth * block;
        for (int64_t r = 0; r < rows; ++r) {
            quantize(r, begin, end);
        }
    }

    void quantize(int64_t row, int64_t begin, int64_t end) {
        const ggml_tensor* b = right();
        const auto* input = reinterpret_cast<const float*>(
            static_cast<const std::byte*>(b->data) +
            static_cast<size_t>(row % b->ne[1]) * b->nb[1] +
            static_cast<size_t>(row / b->ne[1]) * b->nb[2]);
        std::byte* output = quantized.data() + static_cast<size_t>(row) * row_size +
                            ggml_row_size(traits->vec_dot_type, begin);
        if (end > begin) {
            from_float(input + begin, output, end - begin);
        }
    }

    void multiply_plain() {
        const ggml_tensor* a = node->src[0];
        const int64_t total = chunks * static_cast<int64_t>(plain.size());
        for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < total;) {
            const Gathered& expert = plain[static_cast<size_t>(chunk / chunks)];
            const int64_t begin = chunk % chunks * chunk_rows;
            const int64_t end = std::min(begin + chunk_rows, a->ne[1]);
            // Piece by piece: the rows that are there need not wait for the others.
            if (units->wait_arrived(expert.entry, matrix->slice,
                                    static_cast<uint64_t>(end) * a->nb[1]) == 0) {
                failed.store(true, std::memory_order_relaxed);
                continue;
            }
            const auto* rows = static_cast<const std::byte*>(units->data(expert.entry, matrix->slice));
            for (const Row& row : expert.rows) {
                const std::byte* right = column(row);
                float* out = result(row);
                for (int64_t r = begin; r < end; ++r) {
                    traits->vec_dot(static_cast<int>(a->ne[0]), out + r, 0,
                                    rows + static_cast<size_t>(r) * a->nb[1], 0, right, 0, 1);
                }
            }
        }
    }
};

void Computer::Gathered::gather(int ith, int nth) {
    const ggml_tensor* b = product->right();
    const auto width = static_cast<size_t>(b->ne[0]);
    for (size_t r = static_cast<size_t>(ith); r < rows.size(); r += static_cast<size_t>(nth)) {
        std::memcpy(input + r * width, product->raw(rows[r]), width * sizeof(float));
    }
    // All threads wait here, so that none spins at the barrier meanwhile.
    if (product->units->wait(entry, product->matrix->slice) == nullptr) {
        product->failed.store(true, std::memory_order_relaxed);
    }
}

void Computer::Gathered::scatter(int ith, int nth) const {
    const auto width = static_cast<size_t>(product->node->ne[0]);
    for (size_t r = static_cast<size_t>(ith); r < rows.size(); r += static_cast<size_t>(nth)) {
        std::memcpy(product->result(rows[r]), output + r * width, width * sizeof(float));
    }
}

Computer::Computer(const Cpu& cpu, Finder finder, Log log)
    : cpu_(cpu), finder_(std::move(finder)), log_(std::move(log)),
      backend_(ggml_backend_dev_init(cpu.device, nullptr)) {
    if (backend_ == nullptr) {
        throw Error("the CPU backend cannot be started a second time");
    }
    ggml_init_params parameters{};
    parameters.mem_size =
        max_nodes * 4 * ggml_tensor_overhead() + ggml_graph_overhead_custom(max_nodes, false);
    parameters.no_alloc = true;
    context_ = ggml_init(parameters);
    if (context_ == nullptr) {
        ggml_backend_free(backend_);
        throw Error("no memory for the graphs of the expert cache");
    }
}

Computer::~Computer() {
    release();
    ggml_free(context_);
    ggml_backend_free(backend_);
}

void Computer::set_threads(int threads) {
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(cpu_.device);
    const auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads"));
    if (set != nullptr) {
        set(backend_, threads);
    }
}

ggml_status Computer::compute(ggml_cgraph* graph) {
    failed_ = false;
    const int count = ggml_graph_n_nodes(graph);
    for (int i = 0; i < count && !failed_; ++i) {
        ggml_tensor* node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_MUL_MAT_ID) {
            const Found found = finder_(*node->src[0]);
            if (found.matrix != nullptr) {
                multiply(node, found);
                continue;
            }
        }
        add_node(node);
    }
    flush();
    release();
    return failed_ ? GGML_STATUS_FAILED : GGML_STATUS_SUCCESS;
}

void Computer::add_node(ggml_tensor* node) {
    if (pending_ == nullptr) {
        pending_ = ggml_new_graph_custom(context_, max_nodes, false);
    }
    ggml_graph_add_node(pending_, node);
    ++nodes_;
}

void Computer::add_custom(ggml_custom_op_t function, void* task) {
    if (pending_ == nullptr) {
        pending_ = ggml_new_graph_custom(context_, max_nodes, false);
    }
    ggml_tensor* node = ggml_custom_4d(context_, GGML_TYPE_I8, 1, 1, 1, 1, nullptr, 0, function,
                                       GGML_N_TASKS_MAX, task);
    node->flags |= GGML_TENSOR_FLAG_COMPUTE;
    add_node(node);
}

bool Computer::flush() {
    if (pending_ != nullptr) {
        if (ggml_backend_graph_compute(backend_, pending_) != GGML_STATUS_SUCCESS) {
            failed_ = true;
        }
    }
    for (const auto& product : products_) {
        if (!product->failed.load(std::memory_order_relaxed)) {
            continue;
        }
        failed_ = true;
        for (size_t i = 0; i < product->units->size(); ++i) {
            const std::string error = product->units->error(i, product->matrix->slice);
            if (!error.empty()) {
                log_(LogLevel::error, product->matrix->name + ": " + error);
                break;
            }
        }
    }
    products_.clear();
    pending_ = nullptr;
    nodes_ = 0;
    ggml_reset(context_);
    return !failed_;
}

void Computer::multiply(ggml_tensor* node, const Found& found) {
    const ggml_tensor* a = node->src[0];
    const ggml_tensor* b = node->src[1];
    const ggml_tensor* ids = node->src[2];
    Cache& cache = found.weights->cache();

    auto whole = std::make_unique<Product>();
    whole->node = node;
    whole->matrix = found.matrix;
    whole->traits = cpu_.traits(a->type);
    if (whole->traits->vec_dot_type != b->type) {
        whole->from_float = cpu_.traits(whole->traits->vec_dot_type)->from_float;
        whole->row_size = ggml_row_size(whole->traits->vec_dot_type, b->ne[0]);
    }
    whole->chunks = (a->ne[1] + chunk_rows - 1) / chunk_rows;

    // Rows by expert; `plain` holds them all until it is known which are delegated.
    std::vector<int> place(static_cast<size_t>(a->ne[2]), -1);
    std::vector<uint32_t> units;
    for (int32_t token = 0; token < ids->ne[1]; ++token) {
        for (int32_t column = 0; column < ids->ne[0]; ++column) {
            int32_t expert;
            std::memcpy(&expert,
                        static_cast<const std::byte*>(ids->data) +
                            static_cast<size_t>(token) * ids->nb[1] +
                            static_cast<size_t>(column) * ids->nb[0],
                        sizeof expert);
            GGML_ASSERT(expert >= 0 && expert < a->ne[2]);
            int& at = place[static_cast<size_t>(expert)];
            if (at < 0) {
                at = static_cast<int>(units.size());
                units.push_back(found.matrix->first + static_cast<uint32_t>(expert));
                whole->plain.emplace_back();
            }
            whole->plain[static_cast<size_t>(at)].rows.push_back({column, token});
        }
    }

    const bool same_layer = pinned_cache_ == &cache && pinned_ids_ == ids &&
                            pinned_first_ == found.matrix->first;
    if (!same_layer) {
        if (pinned_cache_ != nullptr) {
            if (!flush()) {
                return;
            }
            release();
        }
        if (units.size() > cache.slots_for(units.front())) {
            multiply_in_rounds(node, found, *whole, units);
            return;
        }
        pinned_ = cache.acquire(units.data(), units.size(), {found.matrix->slice});
        pinned_cache_ = &cache;
        pinned_ids_ = ids;
        pinned_first_ = found.matrix->first;
        if (!pinned_.rest().empty()) { // other contexts hold slots
            release();
            multiply_in_rounds(node, found, *whole, units);
            return;
        }
        if (ids->ne[1] >= read_ahead_tokens) {
            read_ahead(found, units.size());
        }
    }
    std::vector<Gathered> experts = std::move(whole->plain);
    whole->plain.clear();
    whole->units = &pinned_;
    take(*whole, experts);
    add_product(std::move(whole));
}

void Computer::multiply_in_rounds(ggml_tensor* node, const Found& found, const Product& whole,
                                  const std::vector<uint32_t>& units) {
    Cache& cache = found.weights->cache();
    std::vector<uint32_t> left(units.size()); // places in `units`
    std::iota(left.begin(), left.end(), 0U);
    const unsigned slice = found.matrix->slice;
    while (!left.empty() && flush()) {
        std::vector<uint32_t> wanted;
        for (const uint32_t i : left) {
            wanted.push_back(units[i]);
        }
        Acquisition round = cache.acquire(wanted.data(), wanted.size(), {slice, slice + 1});
        auto part = std::make_unique<Product>();
        part->node = node;
        part->matrix = whole.matrix;
        part->traits = whole.traits;
        part->from_float = whole.from_float;
        part->row_size = whole.row_size;
        part->chunks = whole.chunks;
        part->units = &round;
        std::vector<Gathered> experts;
        for (size_t i = 0; i < round.size(); ++i) {
            experts.push_back(whole.plain[left[round.position(i)]]);
        }
        take(*part, experts);
        add_product(std::move(part));
        std::vector<uint32_t> rest;
        for (const uint32_t position : round.rest()) {
            rest.push_back(left[position]);
        }
        flush();
        cache.release(round);
        left = std::move(rest);
    }
}

// Distributes the experts, entry i of the acquisition each, between plain and delegated:
// ready ones first.
void Computer::take(Product& product, std::vector<Gathered>& experts) {
    std::vector<uint32_t> order(experts.size());
    product.units->ready_first(product.matrix->slice, order.data());
    for (const uint32_t i : order) {
        experts[i].entry = i;
        auto& list = experts[i].rows.size() < delegate_rows ? product.plain : product.delegated;
        list.push_back(std::move(experts[i]));
    }
}

void Computer::add_product(std::unique_ptr<Product> owned) {
    Product* product = owned.get();
    if (nodes_ + 2 + 3 * product->delegated.size() > max_nodes) {
        const bool in_round = product->units != &pinned_;
        GGML_ASSERT(!in_round); // a round begins with an empty graph
        if (!flush()) {
            return;
        }
    }
    products_.push_back(std::move(owned));
    if (!product->plain.empty()) {
        if (product->from_float != nullptr) {
            const ggml_tensor* b = product->right();
            product->quantized.resize(product->row_size * static_cast<size_t>(b->ne[1] * b->ne[2]));
            add_custom([](ggml_tensor*, int ith, int nth,
                          void* task) { static_cast<Product*>(task)->quantize(ith, nth); },
                       product);
        }
        add_custom([](ggml_tensor*, int, int,
                      void* task) { static_cast<Product*>(task)->multiply_plain(); },
                   product);
    }
    for (Gathered& expert : product->delegated) {
        delegate(*product, expert);
    }
}

void Computer::delegate(Product& product, Gathered& expert) {
    const ggml_tensor* a = product.node->src[0];
    const ggml_tensor* b = product.right();
    const auto rows = static_cast<int64_t>(expert.rows.size());
    expert.product = &product;
    ggml_tensor* weights = ggml_new_tensor_3d(context_, a->type, a->ne[0], a->ne[1], 1);
    ggml_tensor* input = ggml_new_tensor_3d(context_, GGML_TYPE_F32, b->ne[0], 1, rows);
    ggml_tensor* ids = ggml_new_tensor_2d(context_, GGML_TYPE_I32, 1, rows);
    ggml_tensor* output = ggml_mul_mat_id(context_, weights, input, ids);
    output->flags |= GGML_TENSOR_FLAG_COMPUTE;
    weights->data = const_cast<void*>(product.units->data(expert.entry, product.matrix->slice));
    ids->data = zeros(expert.rows.size());
    // Freed with the product: a graph has one result and one input for each expert.
    expert.memory = std::shared_ptr<float[]>(new float[
        static_cast<size_t>((b->ne[0] + a->ne[1]) * rows)]);
    input->data = expert.memory.get();
    output->data = expert.memory.get() + b->ne[0] * rows;
    expert.input = static_cast<float*>(input->data);
    expert.output = static_cast<float*>(output->data);
    add_custom([](ggml_tensor*, int ith, int nth,
                  void* task) { static_cast<Gathered*>(task)->gather(ith, nth); },
               &expert);
    add_node(output);
    add_custom([](ggml_tensor*, int ith, int nth,
                  void* task) { static_cast<Gathered*>(task)->scatter(ith, nth); },
               &expert);
}

int32_t* Computer::zeros(size_t count) {
    if (zeros_.empty() || zeros_.back().size() < count) {
        zeros_.emplace_back(std::max<size_t>(count, 4096), 0); // older ones may be in use
    }
    return zeros_.back().data();
}

void Computer::read_ahead(const Found& found, size_t experts_used) {
    // Only if nearly all experts are used: then the next layer's will be too.
    if (experts_used * 2 < found.matrix->experts) {
        return;
    }
    std::vector<uint32_t> next;
    Cache& cache = found.weights->cache();
    const uint32_t begin = found.matrix->first + found.matrix->experts;
    for (uint32_t e = 0; e < found.matrix->experts && begin + e < cache.unit_count(); ++e) {
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
