// The ggml backend: how llama.cpp sees the expert cache.
//
// An ACCEL device with a buffer type of its own. The loader puts expert matrices there (by
// -ot …=MOETUNER, or because ACCEL stands before the CPU), by pointer into the mapped file;
// the scheduler then gives us their products. docs/engine.md tells the seams.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include "ggml/computer.h"
#include "ggml/mapping.h"
#include "ggml/weights.h"

namespace moetuner {
namespace {

constexpr const char* name = "MOETUNER";
constexpr size_t alignment = 64;

struct Buffer {
    void* base = nullptr;
    size_t size = 0;
    bool owned = false; // allocated here, else a mapping of llama.cpp's
    std::shared_ptr<Weights> weights; // its model's; null until an expert matrix is placed
};

// All that is shared by the process. Leaked on purpose: threads of ggml may still run while
// static objects are destroyed.
struct State {
    Settings settings;
    Cpu cpu;
    Log log;
    std::mutex mutex;
    std::list<std::weak_ptr<Weights>> models; // a model lives as long as one of its buffers
};

State* state = nullptr;

void log_line(LogLevel level, const std::string& text) {
    switch (level) {
    case LogLevel::info:
        GGML_LOG_INFO("moetuner: %s\n", text.c_str());
        break;
    case LogLevel::warning:
        GGML_LOG_WARN("moetuner: %s\n", text.c_str());
        break;
    case LogLevel::error:
        GGML_LOG_ERROR("moetuner: %s\n", text.c_str());
        break;
    }
}

Buffer& of(ggml_backend_buffer_t buffer) {
    return *static_cast<Buffer*>(buffer->context);
}

// Buffers

void buffer_free(ggml_backend_buffer_t buffer) {
    Buffer* mine = &of(buffer);
    if (mine->owned) {
        munmap(mine->base, mine->size);
    }
    delete mine;
}

void* buffer_base(ggml_backend_buffer_t buffer) {
    return of(buffer).base;
}

// Weights that the loader is going to write to memory itself (no mmap): what it writes is
// thrown away, since the bytes are read from the file when they are needed.
void make_sink(const ggml_tensor& tensor) {
    constexpr size_t sink_bytes = size_t{64} << 20;
    static const int sink = [] {
        const int fd = memfd_create("moetuner-sink", MFD_CLOEXEC);
        return fd >= 0 && ftruncate(fd, sink_bytes) == 0 ? fd : -1;
    }();
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    uintptr_t at = (reinterpret_cast<uintptr_t>(tensor.data) + page - 1) / page * page;
    const uintptr_t end =
        (reinterpret_cast<uintptr_t>(tensor.data) + ggml_nbytes(&tensor)) / page * page;
    while (sink >= 0 && at < end) {
        const size_t length = std::min<size_t>(sink_bytes, end - at);
        if (mmap(reinterpret_cast<void*>(at), length, PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_FIXED | MAP_NORESERVE, sink, 0) == MAP_FAILED) {
            return; // then it stays anonymous memory: larger, but right
        }
        at += length;
    }
}

// The model that is being loaded and that a matrix of this file belongs to: a new one if
// that file's model is in use already, or has this matrix (the same file loaded twice).
std::shared_ptr<Weights> model_of(const ggml_tensor& tensor, const FilePlace& place) {
    const std::lock_guard<std::mutex> guard(state->mutex);
    state->models.remove_if([](const std::weak_ptr<Weights>& model) { return model.expired(); });
    for (const std::weak_ptr<Weights>& candidate : state->models) {
        std::shared_ptr<Weights> model = candidate.lock();
        if (model && model->lacks(tensor.name, place)) {
            return model;
        }
    }
    auto model = std::make_shared<Weights>(state->settings, state->log);
    state->models.push_back(model);
    return model;
}

ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor) {
    Buffer& mine = of(buffer);
    if (tensor->view_src != nullptr || !Weights::is_expert(tensor->name, state->settings)) {
        return GGML_STATUS_SUCCESS;
    }
    try {
        const FilePlace place = mine.owned ? place_of_tensor(tensor->name, ggml_nbytes(tensor))
                                           : place_of_address(tensor->data);
        if (!mine.weights) {
            mine.weights = model_of(*tensor, place);
        }
        mine.weights->add(*tensor, place);
        if (mine.owned) {
            make_sink(*tensor);
        }
    } catch (const std::exception& error) {
        log_line(LogLevel::error, std::string(tensor->name) + ": " + error.what());
        return GGML_STATUS_FAILED;
    }
    return GGML_STATUS_SUCCESS;
}

void buffer_memset(ggml_backend_buffer_t, ggml_tensor* tensor, uint8_t value, size_t offset,
                   size_t size) {
    std::memset(static_cast<char*>(tensor->data) + offset, value, size);
}

void buffer_set(ggml_backend_buffer_t, ggml_tensor* tensor, const void* data, size_t offset,
                size_t size) {
    std::memcpy(static_cast<char*>(tensor->data) + offset, data, size);
}

void buffer_get(ggml_backend_buffer_t buffer, const ggml_tensor* tensor, void* data, size_t offset,
                size_t size) {
    Buffer& mine = of(buffer);
    if (mine.owned && mine.weights && Weights::is_expert(tensor->name, state->settings)) {
        const Matrix* matrix = mine.weights->find(tensor->data);
        if (matrix != nullptr &&
            pread(matrix->place.file->fd, data, size,
                  static_cast<off_t>(matrix->place.offset + offset)) ==
                static_cast<ssize_t>(size)) {
            return;
        }
        log_line(LogLevel::error, std::string(tensor->name) + " cannot be read back");
        std::abort();
    }
    std::memcpy(data, static_cast<const char*>(tensor->data) + offset, size);
}

bool buffer_copy(ggml_backend_buffer_t, const ggml_tensor* source, ggml_tensor* target) {
    if (!ggml_backend_buffer_is_host(source->buffer)) {
        return false;
    }
    std::memcpy(target->data, source->data, ggml_nbytes(source));
    return true;
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    std::memset(of(buffer).base, value, of(buffer).size);
}

const ggml_backend_buffer_i buffer_interface = {
    /* .free_buffer   = */ buffer_free,
    /* .get_base      = */ buffer_base,
    /* .init_tensor   = */ buffer_init_tensor,
    /* .memset_tensor = */ buffer_memset,
    /* .set_tensor    = */ buffer_set,
    /* .get_tensor    = */ buffer_get,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ buffer_copy,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

ggml_backend_buffer_t make_buffer(ggml_backend_buffer_type_t type, void* base, size_t size,
                                  bool owned) {
    return ggml_backend_buffer_init(type, buffer_interface, new Buffer{base, size, owned, nullptr},
                                    size);
}

// Buffer type

const char* type_name(ggml_backend_buffer_type_t) {
    return name;
}

ggml_backend_buffer_t type_alloc(ggml_backend_buffer_type_t type, size_t size) {
    if (size == 0) {
        return make_buffer(type, nullptr, 0, false);
    }
    // Pages come when they are touched: those of expert weights never are.
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return nullptr;
    }
    return make_buffer(type, base, size, true);
}

size_t type_alignment(ggml_backend_buffer_type_t) {
    return alignment;
}

// Our memory is ordinary memory: the CPU may read our results and we its, without copies.
bool type_is_host(ggml_backend_buffer_type_t) {
    return true;
}

ggml_backend_buffer_type_t buffer_type();

bool ours(const ggml_tensor* tensor) {
    return tensor->buffer != nullptr && tensor->buffer->buft == buffer_type();
}

// Backend (one for each context)

ggml_guid_t guid() {
    static ggml_guid value = {0x6d, 0x6f, 0x65, 0x74, 0x75, 0x6e, 0x65, 0x72,
                              0x2d, 0x65, 0x78, 0x70, 0x65, 0x72, 0x74, 0x31};
    return &value;
}

const char* backend_name(ggml_backend_t) {
    return name;
}

void backend_free(ggml_backend_t backend) {
    delete static_cast<Computer*>(backend->context);
    delete backend;
}

ggml_status backend_compute(ggml_backend_t backend, ggml_cgraph* graph) {
    try {
        return static_cast<Computer*>(backend->context)->compute(graph);
    } catch (const std::exception& error) {
        log_line(LogLevel::error, error.what());
        return GGML_STATUS_FAILED;
    }
}

const ggml_backend_i backend_interface = [] {
    ggml_backend_i i{};
    i.get_name = backend_name;
    i.free = backend_free;
    i.graph_compute = backend_compute;
    return i;
}();

Found find(const ggml_tensor& weights) {
    if (!ours(&weights) || weights.buffer->context == nullptr) {
        return {};
    }
    const Buffer& buffer = of(weights.buffer);
    if (!buffer.weights) {
        return {};
    }
    return {buffer.weights.get(), buffer.weights->find(weights.data)};
}

// Device

const char* device_name(ggml_backend_dev_t) {
    return name;
}

const char* device_description(ggml_backend_dev_t) {
    return "expert cache: experts from the file, computed by the CPU backend";
}

void device_memory(ggml_backend_dev_t, size_t* free, size_t* total) {
    *free = 0;
    *total = 0;
}

enum ggml_backend_dev_type device_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

void device_properties(ggml_backend_dev_t device, ggml_backend_dev_props* properties) {
    *properties = {};
    properties->name = device_name(device);
    properties->description = device_description(device);
    properties->type = device_type(device);
    properties->caps.buffer_from_host_ptr = true;
}

ggml_backend_t device_init(ggml_backend_dev_t device, const char*) {
    try {
        return new ggml_backend{guid(), backend_interface, device,
                                new Computer(state->cpu, find, state->log)};
    } catch (const std::exception& error) {
        log_line(LogLevel::error, error.what());
        return nullptr;
    }
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t) {
    return buffer_type();
}

ggml_backend_buffer_t device_buffer_from_pointer(ggml_backend_dev_t, void* pointer, size_t size,
                                                 size_t) {
    return make_buffer(buffer_type(), pointer, size, false);
}

bool is_product(const ggml_tensor* node) {
    const ggml_tensor* a = node->src[0];
    const ggml_tensor* b = node->src[1];
    return node->op == GGML_OP_MUL_MAT_ID && ours(a) &&
           Weights::is_expert(a->name, state->settings) && a->view_src == nullptr &&
           state->cpu.traits(a->type)->vec_dot != nullptr && ggml_is_contiguous(a) &&
           b->type == GGML_TYPE_F32 && b->nb[0] == sizeof(float) && b->ne[3] == 1 &&
           node->type == GGML_TYPE_F32;
}

// Whether a value comes from one of our products by way of operations that we take along.
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
    case GGML_OP_GLU:
    case GGML_OP_UNARY:
    case GGML_OP_CLAMP:
    case GGML_OP_SCALE:
    case GGML_OP_ADD_ID:
        return descends(value->src[0], depth - 1);
    default:
        return false;
    }
}

// Conservative: the products, and of their neighbours what would otherwise cut the graph in
// two between gate and down. The CPU backend computes those all the same.
bool device_supports_op(ggml_backend_dev_t, const ggml_tensor* node) {
    constexpr int depth = 8; // operations between two products of a layer
    switch (node->op) {
    case GGML_OP_NONE:
    case GGML_OP_VIEW:
    case GGML_OP_RESHAPE:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
        return true;
    case GGML_OP_MUL_MAT_ID:
        return is_product(node);
    case GGML_OP_GLU:
    case GGML_OP_UNARY:
    case GGML_OP_CLAMP:
    case GGML_OP_SCALE:
    case GGML_OP_ADD_ID:
        return descends(node, depth) && ggml_backend_dev_supports_op(state->cpu.device, node);
    default:
        return false;
    }
}

bool device_supports_type(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
    return ggml_backend_buft_is_host(type);
}

const ggml_backend_device_i device_interface = [] {
    ggml_backend_device_i i{};
    i.get_name = device_name;
    i.get_description = device_description;
    i.get_memory = device_memory;
    i.get_type = device_type;
    i.get_props = device_properties;
    i.init_backend = device_init;
    i.get_buffer_type = device_buffer_type;
    i.buffer_from_host_ptr = device_buffer_from_pointer;
    i.supports_op = device_supports_op;
    i.supports_buft = device_supports_type;
    return i;
}();

// Registry

void set_threads(ggml_backend_t backend, int threads) {
    static_cast<Computer*>(backend->context)->set_threads(threads);
}

const char* registry_name(ggml_backend_reg_t) {
    return name;
}

size_t registry_count(ggml_backend_reg_t) {
    return 1;
}

ggml_backend_dev_t registry_device(ggml_backend_reg_t, size_t);

void* registry_function(ggml_backend_reg_t, const char* function) {
    if (std::strcmp(function, "ggml_backend_set_n_threads") == 0) {
        return reinterpret_cast<void*>(set_threads);
    }
    return nullptr;
}

ggml_backend_reg registry = {
    GGML_BACKEND_API_VERSION,
    {registry_name, registry_count, registry_device, registry_function},
    nullptr,
};

ggml_backend_dev_t registry_device(ggml_backend_reg_t, size_t) {
    static ggml_backend_device device = {device_interface, &registry, nullptr};
    return &device;
}

ggml_backend_buffer_type_t buffer_type() {
    static ggml_backend_buffer_type type = [] {
        ggml_backend_buffer_type t{};
        t.iface.get_name = type_name;
        t.iface.alloc_buffer = type_alloc;
        t.iface.get_alignment = type_alignment;
        t.iface.is_host = type_is_host;
        t.device = registry_device(nullptr, 0);
        return t;
    }();
    return &type;
}

} // namespace
} // namespace moetuner

extern "C" {

// The loader's entry point. Null (with the reason in the log) when this plugin must not be
// used: the program then runs as without it.
__attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    using namespace moetuner;
    // Structures differ between commits with the same API version.
    if (std::strcmp(ggml_commit(), MOETUNER_GGML_COMMIT) != 0) {
        log_line(LogLevel::error, std::string("built for ggml ") + MOETUNER_GGML_COMMIT +
                                      ", but this program has " + ggml_commit() +
                                      ": not used (moetuner engine build makes one that fits)");
        return nullptr;
    }
    try {
        if (state == nullptr) {
            auto fresh = std::make_unique<State>();
            fresh->settings = Settings::from_environment();
            fresh->cpu = Cpu::find();
            fresh->log = log_line;
            state = fresh.release();
        }
    } catch (const std::exception& error) {
        log_line(LogLevel::error, std::string(error.what()) + ": not used");
        return nullptr;
    }
    return &registry;
}
}
