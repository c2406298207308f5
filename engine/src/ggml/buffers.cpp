// Buffers: where llama.cpp's loader puts experts, and what a matrix in them is.
//
// Three kinds. A mapping of llama.cpp's, when it loads by mmap. Memory of our own, for the
// results of our splits and for what else a pattern sends here (biases). And, when it loads
// without mmap, experts: address space without memory, in a buffer that is not host memory,
// so that the loader hands over what it has read (buffer_set) instead of writing to it.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

#include "ggml/plugin.h"

namespace moetuner {
namespace {

constexpr size_t alignment = 64;

struct Buffer {
    void* base = nullptr;
    size_t size = 0;
    bool owned = false;               // mapped by us
    std::shared_ptr<Weights> weights; // its model's; null until an expert matrix is placed
    // Of an owned buffer: the experts in it. Freed with it.
    ggml_backend_buffer_t experts = nullptr;
};

Buffer& of(ggml_backend_buffer_t buffer) {
    return *static_cast<Buffer*>(buffer->context);
}

ggml_backend_buffer_type_t expert_type();

void buffer_free(ggml_backend_buffer_t buffer) {
    const std::unique_ptr<Buffer> mine(&of(buffer));
    if (mine->experts != nullptr) {
        ggml_backend_buffer_free(mine->experts);
    }
    if (mine->owned) {
        munmap(mine->base, mine->size);
    }
}

void* buffer_base(ggml_backend_buffer_t buffer) {
    return of(buffer).base;
}

// The model that is being loaded and that a matrix of this file belongs to: a new one if
// that file's model is in use already, or has this matrix (the same file loaded twice).
std::shared_ptr<Weights> model_of(const ggml_tensor& tensor, const FilePlace& place) {
    for (std::shared_ptr<Weights>& model : state().live_models()) {
        if (model->lacks(tensor.name, place)) {
            return model;
        }
    }
    auto model = std::make_shared<Weights>(state().settings, log_line);
    const std::lock_guard<std::mutex> guard(state().mutex);
    state().models.push_back(model);
    return model;
}

std::set<int> descriptors_of_ours() {
    std::set<int> all;
    for (const std::shared_ptr<Weights>& model : state().live_models()) {
        all.merge(model->descriptors());
    }
    return all;
}

// An expert that the loader reads itself: no memory for it.
void move_to_experts(ggml_backend_buffer_t buffer, ggml_tensor* tensor) {
    Buffer& mine = of(buffer);
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto data = reinterpret_cast<uintptr_t>(tensor->data);
    const uintptr_t begin = (data + page - 1) / page * page;
    const uintptr_t end = (data + ggml_nbytes(tensor)) / page * page;
    if (begin < end) {
        mprotect(reinterpret_cast<void*>(begin), end - begin, PROT_NONE);
    }
    if (mine.experts == nullptr) {
        mine.experts = ggml_backend_buffer_init(expert_type(), buffer->iface,
                                                new Buffer{mine.base, mine.size, false, {}, {}},
                                                mine.size);
        ggml_backend_buffer_set_usage(mine.experts, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    of(mine.experts).weights = mine.weights;
    tensor->buffer = mine.experts;
}

// Whether products with it will be ours (device.cpp asks the same of a product).
bool is_expert(const ggml_tensor& tensor) {
    return tensor.view_src == nullptr && Weights::is_expert(tensor.name, state().settings) &&
           state().cpu.traits(tensor.type)->vec_dot != nullptr && ggml_is_contiguous(&tensor);
}

ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor) {
    Buffer& mine = of(buffer);
    if (!is_expert(*tensor)) {
        return GGML_STATUS_SUCCESS;
    }
    try {
        const FilePlace place =
            mine.owned ? state().files.place_of_tensor(tensor->name, ggml_nbytes(tensor),
                                                       descriptors_of_ours())
                       : state().files.place_of_address(tensor->data);
        if (!mine.weights) {
            mine.weights = model_of(*tensor, place);
        }
        mine.weights->add(*tensor, place);
    } catch (const std::exception& error) {
        log_line(LogLevel::error, std::string(tensor->name) + ": " + error.what());
        return GGML_STATUS_FAILED;
    }
    if (mine.owned) {
        move_to_experts(buffer, tensor);
    }
    return GGML_STATUS_SUCCESS;
}

bool without_memory(ggml_backend_buffer_t buffer) {
    return buffer->buft == expert_type();
}

void buffer_memset(ggml_backend_buffer_t buffer, ggml_tensor* tensor, uint8_t value, size_t offset,
                   size_t size) {
    if (!without_memory(buffer)) {
        std::memset(static_cast<char*>(tensor->data) + offset, value, size);
    }
}

void buffer_set(ggml_backend_buffer_t buffer, ggml_tensor* tensor, const void* data, size_t offset,
                size_t size) {
    if (without_memory(buffer)) {
        of(buffer).weights->check(tensor->data, data, offset, size);
        return;
    }
    std::memcpy(static_cast<char*>(tensor->data) + offset, data, size);
}

void buffer_get(ggml_backend_buffer_t buffer, const ggml_tensor* tensor, void* data, size_t offset,
                size_t size) {
    if (!without_memory(buffer)) {
        std::memcpy(data, static_cast<const char*>(tensor->data) + offset, size);
        return;
    }
    const ggml_tensor* whole = tensor->view_src != nullptr ? tensor->view_src : tensor;
    const Matrix* matrix = of(buffer).weights->find(whole->data);
    const auto from = static_cast<size_t>(static_cast<const char*>(tensor->data) -
                                          static_cast<const char*>(whole->data)) +
                      offset;
    for (size_t done = 0; matrix != nullptr && done < size;) {
        const ssize_t got = pread(matrix->place.file->fd, static_cast<char*>(data) + done,
                                  size - done,
                                  static_cast<off_t>(matrix->place.offset + from + done));
        if (got <= 0) {
            matrix = nullptr;
            break;
        }
        done += static_cast<size_t>(got);
    }
    if (matrix == nullptr) { // there is no other way to say so
        log_line(LogLevel::error, std::string(tensor->name) + " cannot be read back from its file");
        std::abort();
    }
}

bool buffer_copy(ggml_backend_buffer_t buffer, const ggml_tensor* source, ggml_tensor* target) {
    if (without_memory(buffer) || !ggml_backend_buffer_is_host(source->buffer)) {
        return false;
    }
    std::memcpy(target->data, source->data, ggml_nbytes(source));
    return true;
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    Buffer& mine = of(buffer);
    if (!without_memory(buffer) && mine.experts == nullptr) {
        std::memset(mine.base, value, mine.size);
    }
}

const ggml_backend_buffer_i buffer_interface = [] {
    ggml_backend_buffer_i i{};
    i.free_buffer = buffer_free;
    i.get_base = buffer_base;
    i.init_tensor = buffer_init_tensor;
    i.memset_tensor = buffer_memset;
    i.set_tensor = buffer_set;
    i.get_tensor = buffer_get;
    i.cpy_tensor = buffer_copy;
    i.clear = buffer_clear;
    return i;
}();

ggml_backend_buffer_t make_buffer(void* base, size_t size, bool owned) {
    return ggml_backend_buffer_init(buffer_type(), buffer_interface,
                                    new Buffer{base, size, owned, {}, {}}, size);
}

ggml_backend_buffer_t type_alloc(ggml_backend_buffer_type_t, size_t size) {
    if (size == 0) {
        return make_buffer(nullptr, 0, false);
    }
    // Pages come when they are touched: those of expert weights never are.
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return nullptr;
    }
    return make_buffer(base, size, true);
}

ggml_backend_buffer_type make_type(const char* (*get_name)(ggml_backend_buffer_type_t),
                                   bool (*is_host)(ggml_backend_buffer_type_t)) {
    ggml_backend_buffer_type type{};
    type.iface.get_name = get_name;
    type.iface.alloc_buffer = type_alloc; // of either: adapters of experts ask for expert_type()
    type.iface.get_alignment = [](ggml_backend_buffer_type_t) { return alignment; };
    type.iface.is_host = is_host;
    type.device = device();
    return type;
}

ggml_backend_buffer_type_t expert_type() {
    static ggml_backend_buffer_type type =
        make_type([](ggml_backend_buffer_type_t) { return "MOETUNER_EXPERTS"; },
                  [](ggml_backend_buffer_type_t) { return false; });
    return &type;
}

} // namespace

ggml_backend_buffer_type_t buffer_type() {
    // Ordinary memory: the CPU may read our results and we its, without copies.
    static ggml_backend_buffer_type type =
        make_type([](ggml_backend_buffer_type_t) { return plugin_name; },
                  [](ggml_backend_buffer_type_t) { return true; });
    return &type;
}

bool is_ours(ggml_backend_buffer_type_t type) {
    return type == buffer_type() || type == expert_type();
}

ggml_backend_buffer_t buffer_over(void* memory, size_t bytes) {
    return make_buffer(memory, bytes, false);
}

Found find_matrix(const ggml_tensor& tensor) {
    if (tensor.buffer == nullptr || !is_ours(tensor.buffer->buft)) {
        return {};
    }
    const Buffer& buffer = of(tensor.buffer);
    if (!buffer.weights) {
        return {};
    }
    return {buffer.weights.get(), buffer.weights->find(tensor.data)};
}

} // namespace moetuner
