// What the parts of the plugin share: one state for the process, and the objects that ggml
// is given.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "ggml-backend-impl.h"

#include "ggml/computer.h"
#include "ggml/cpu.h"
#include "ggml/mapping.h"
#include "ggml/settings.h"
#include "ggml/weights.h"

namespace moetuner {

constexpr const char* plugin_name = "MOETUNER";

struct State {
    Settings settings;
    Cpu cpu;
    OpenFiles files;
    std::mutex mutex;
    std::list<std::weak_ptr<Weights>> models; // a model lives as long as one of its buffers
    std::atomic<bool> served{false};          // some product was computed
    std::atomic<bool> missed{false};          // the warning that none was has been given

    // Those that are alive.
    std::list<std::shared_ptr<Weights>> live_models();
};

// Made when the plugin is loaded; leaked on purpose: threads of ggml may still run while
// static objects are destroyed.
State& state();
// Throws Error. Does nothing when there is one already.
void make_state();

void log_line(LogLevel level, const std::string& text);

// buffers.cpp

ggml_backend_buffer_type_t buffer_type();
bool is_ours(ggml_backend_buffer_type_t type);
// Memory of llama.cpp's: its mapping of a model.
ggml_backend_buffer_t buffer_over(void* memory, size_t bytes);
// Null if `tensor` lies in no buffer of ours, or is no expert matrix.
Found find_matrix(const ggml_tensor& tensor);

// device.cpp

ggml_backend_dev_t device();
ggml_backend_reg_t registry();

} // namespace moetuner
