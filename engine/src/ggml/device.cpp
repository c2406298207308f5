// How llama.cpp sees the expert cache: an ACCEL device with a buffer type of its own, and
// the backend that each context has of it. docs/engine.md tells the seams.
#include <cstring>

#include "ggml/plugin.h"

namespace moetuner {
namespace {

// Backend

ggml_guid_t guid() {
    static ggml_guid value = {0x6d, 0x6f, 0x65, 0x74, 0x75, 0x6e, 0x65, 0x72,
                              0x2d, 0x65, 0x78, 0x70, 0x65, 0x72, 0x74, 0x31};
    return &value;
}

struct Context {
    Computer computer;
    unsigned graphs = 0; // of llama.cpp's context, ours or not
};

Context& of(ggml_backend_t backend) {
    return *static_cast<Context*>(backend->context);
}

void backend_free(ggml_backend_t backend) {
    delete &of(backend);
    delete backend;
}

ggml_status backend_compute(ggml_backend_t backend, ggml_cgraph* graph) {
    state().served.store(true, std::memory_order_relaxed);
    try {
        return of(backend).computer.compute(graph);
    } catch (const std::exception& error) {
        log_line(LogLevel::error, error.what());
        return GGML_STATUS_FAILED;
    }
}

// llama.cpp calls it before every graph: a second time with nothing served means that there
// is nothing to serve.
void set_threads(ggml_backend_t backend, int threads) {
    Context& context = of(backend);
    context.computer.set_threads(threads);
    if (context.graphs < 2 && ++context.graphs == 2 && state().settings.cache_bytes != 0 &&
        !state().served.load(std::memory_order_relaxed) && !state().missed.exchange(true)) {
        log_line(LogLevel::warning,
                 "a cache was asked for (MOETUNER_CACHE_MIB), but no expert of this model is "
                 "computed from the buffer type MOETUNER: nothing is cached");
    }
}

void set_abort(ggml_backend_t backend, ggml_abort_callback callback, void* data) {
    of(backend).computer.cpu().set_abort(callback, data);
}

const ggml_backend_i backend_interface = [] {
    ggml_backend_i i{};
    i.get_name = [](ggml_backend_t) { return plugin_name; };
    i.free = backend_free;
    i.graph_compute = backend_compute;
    return i;
}();

// Device

bool is_product(const ggml_tensor* node) {
    const ggml_tensor* a = node->src[0];
    const ggml_tensor* b = node->src[1];
    return node->op == GGML_OP_MUL_MAT_ID && a->buffer != nullptr && is_ours(a->buffer->buft) &&
           Weights::is_expert(a->name, state().settings) && a->view_src == nullptr &&
           state().cpu.traits(a->type)->vec_dot != nullptr && ggml_is_contiguous(a) &&
           b->type == GGML_TYPE_F32 && b->nb[0] == sizeof(float) && b->ne[3] == 1 &&
           node->src[2]->type == GGML_TYPE_I32 && node->type == GGML_TYPE_F32 &&
           node->nb[0] == sizeof(float);
}

// What may lie between two products of a layer.
bool is_between(ggml_op op) {
    switch (op) {
    case GGML_OP_GLU:
    case GGML_OP_UNARY:
    case GGML_OP_CLAMP:
    case GGML_OP_SCALE:
    case GGML_OP_SQR:
    case GGML_OP_MUL:
    case GGML_OP_ADD_ID:
        return true;
    default:
        return false;
    }
}

// Whether a value is made of our products by way of operations that we take along.
bool descends(const ggml_tensor* value, int depth) {
    if (value == nullptr || depth == 0) {
        return false;
    }
    switch (value->op) {
    case GGML_OP_MUL_MAT_ID:
        return is_product(value);
    case GGML_OP_VIEW:
    case GGML_OP_RESHAPE:
    case GGML_OP_PERMUTE:
        return descends(value->src[0], depth - 1);
    case GGML_OP_MUL: // not by the router's weights: that comes after the last product
        return descends(value->src[0], depth - 1) && descends(value->src[1], depth - 1);
    default:
        return is_between(value->op) && descends(value->src[0], depth - 1);
    }
}

// Conservative: the products, and of their neighbours what would otherwise cut the graph in
// two between gate and down. The CPU backend computes those all the same.
bool supports_op(ggml_backend_dev_t, const ggml_tensor* node) {
    constexpr int depth = 8; // operations between two products of a layer
    switch (node->op) {
    case GGML_OP_NONE: // and views, or the scheduler aborts
    case GGML_OP_VIEW:
    case GGML_OP_RESHAPE:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
        return true;
    case GGML_OP_MUL_MAT_ID:
        return is_product(node);
    default:
        return is_between(node->op) && descends(node, depth) &&
               ggml_backend_dev_supports_op(state().cpu.device, node);
    }
}

ggml_backend_t device_init(ggml_backend_dev_t self, const char*) {
    try {
        // Now rather than at the first token: a context that cannot be had is a clear end.
        for (const std::shared_ptr<Weights>& model : state().live_models()) {
            model->require_budget();
        }
        return new ggml_backend{guid(), backend_interface, self,
                                new Context{{state().cpu, find_matrix, log_line}}};
    } catch (const std::exception& error) {
        log_line(LogLevel::error, error.what());
        return nullptr;
    }
}

void device_properties(ggml_backend_dev_t self, ggml_backend_dev_props* properties) {
    *properties = {};
    properties->name = ggml_backend_dev_name(self);
    properties->description = ggml_backend_dev_description(self);
    properties->type = ggml_backend_dev_type(self);
    properties->caps.buffer_from_host_ptr = true;
    properties->caps.mmap_support = true;
}

const ggml_backend_device_i device_interface = [] {
    ggml_backend_device_i i{};
    i.get_name = [](ggml_backend_dev_t) { return plugin_name; };
    i.get_description = [](ggml_backend_dev_t) {
        return "expert cache: experts from the file, computed by the CPU backend";
    };
    i.get_memory = [](ggml_backend_dev_t, size_t* free, size_t* total) { *free = *total = 0; };
    i.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; };
    i.get_props = device_properties;
    i.init_backend = device_init;
    i.get_buffer_type = [](ggml_backend_dev_t) { return buffer_type(); };
    i.buffer_from_host_ptr = [](ggml_backend_dev_t, void* memory, size_t size, size_t) {
        return buffer_over(memory, size);
    };
    i.supports_op = supports_op;
    i.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
        return is_ours(type) || ggml_backend_buft_is_host(type);
    };
    return i;
}();

// Registry

void* function(ggml_backend_reg_t, const char* name) {
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return reinterpret_cast<void*>(set_threads);
    }
    if (std::strcmp(name, "ggml_backend_set_abort_callback") == 0) {
        return reinterpret_cast<void*>(set_abort);
    }
    return nullptr;
}

} // namespace

ggml_backend_reg_t registry() {
    static ggml_backend_reg value = {
        GGML_BACKEND_API_VERSION,
        {[](ggml_backend_reg_t) { return plugin_name; },
         [](ggml_backend_reg_t) { return size_t{1}; },
         [](ggml_backend_reg_t, size_t) { return device(); }, function},
        nullptr,
    };
    return &value;
}

ggml_backend_dev_t device() {
    static ggml_backend_device value = {device_interface, registry(), nullptr};
    return &value;
}

} // namespace moetuner
