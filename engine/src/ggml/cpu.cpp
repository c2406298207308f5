#include "ggml/cpu.h"

#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

#include "ggml-backend-impl.h"
#include "io/log.h"

namespace moetuner {
namespace {

bool has_feature(ggml_backend_reg_t registry, const char* name) {
    const auto features = reinterpret_cast<ggml_backend_get_features_t>(
        ggml_backend_reg_get_proc_address(registry, "ggml_backend_get_features"));
    for (const ggml_backend_feature* f = features != nullptr ? features(registry) : nullptr;
         f != nullptr && f->name != nullptr; ++f) {
        if (std::strcmp(f->name, name) == 0) {
            return true;
        }
    }
    return false;
}

template <typename Function> Function symbol(void* library, const char* name) {
    void* found = dlsym(library, name);
    if (found == nullptr) {
        throw Error(std::string("the CPU backend has no ") + name);
    }
    return reinterpret_cast<Function>(found);
}

} // namespace

Cpu Cpu::find() {
    Cpu cpu;
    cpu.device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (cpu.device == nullptr) {
        throw Error("no CPU backend is loaded");
    }
    cpu.openmp = has_feature(ggml_backend_dev_backend_reg(cpu.device), "OPENMP");
    // Not linked: a program may have loaded one of several builds of it. The library is the
    // one that holds the device's own functions.
    Dl_info info{};
    void* inside = reinterpret_cast<void*>(cpu.device->iface.get_name);
    void* library =
        dladdr(inside, &info) != 0 ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : nullptr;
    if (library == nullptr) {
        throw Error("the library of the CPU backend cannot be found");
    }
    cpu.traits = symbol<decltype(cpu.traits)>(library, "ggml_get_type_traits_cpu");
#ifdef MOETUNER_TILED
    cpu.tiled = symbol<decltype(cpu.tiled)>(library, "ggml_compute_forward_mul_mat_id_tiled");
    cpu.tiled_scratch = symbol<decltype(cpu.tiled_scratch)>(library, "ggml_tiled_wdata_size");
    const char* force = std::getenv("GGML_CPU_TILED_MM_FORCE"); // as stock reads it
    if (force != nullptr && std::atoi(force) == 1) {
        cpu.tiled_rows = 1;
    }
#endif
    return cpu;
}

CpuBackend::CpuBackend(const Cpu& cpu)
    : cpu_(cpu), backend_(ggml_backend_dev_init(cpu.device, nullptr)) {
    if (backend_ == nullptr) {
        throw Error("the CPU backend cannot be started a second time");
    }
}

CpuBackend::~CpuBackend() {
    ggml_backend_free(backend_);
    if (pool_ != nullptr) {
        function<decltype(&ggml_threadpool_free)>("ggml_threadpool_free")(pool_);
    }
}

template <typename Function> Function CpuBackend::function(const char* name) const {
    return reinterpret_cast<Function>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu_.device), name));
}

void CpuBackend::set_threads(int threads) {
    if (threads == threads_ && (cpu_.openmp || pool_ != nullptr)) {
        return;
    }
    threads_ = threads;
    if (const auto set =
            function<ggml_backend_set_n_threads_t>("ggml_backend_set_n_threads")) {
        set(backend_, threads);
    }
    // Without OpenMP and without a pool ggml starts and ends threads for every graph.
    const auto create = function<decltype(&ggml_threadpool_new)>("ggml_threadpool_new");
    const auto attach =
        function<decltype(&ggml_backend_cpu_set_threadpool)>("ggml_backend_cpu_set_threadpool");
    const auto destroy = function<decltype(&ggml_threadpool_free)>("ggml_threadpool_free");
    if (cpu_.openmp || threads <= pool_threads_ || create == nullptr || attach == nullptr ||
        destroy == nullptr) {
        return;
    }
    ggml_threadpool_params parameters = ggml_threadpool_params_default(threads);
    // llama.cpp's own pool has the cores between our graphs.
    parameters.poll = 0;
    ggml_threadpool_t pool = create(&parameters);
    if (pool == nullptr) {
        return;
    }
    attach(backend_, pool);
    if (pool_ != nullptr) {
        destroy(pool_);
    }
    pool_ = pool;
    pool_threads_ = threads;
}

void CpuBackend::set_abort(ggml_abort_callback callback, void* data) {
    if (const auto set = function<ggml_backend_set_abort_callback_t>(
            "ggml_backend_set_abort_callback")) {
        set(backend_, callback, data);
    }
}

} // namespace moetuner
