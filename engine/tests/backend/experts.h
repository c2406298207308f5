// How the test programs ask llama.cpp for the buffer type of the experts.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "ggml-backend.h"
#include "llama.h"

// Throws std::runtime_error: there is none of that name.
inline ggml_backend_buffer_type_t buffer_type(const std::string& name) {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(ggml_backend_dev_get(i));
        if (type != nullptr && name == ggml_backend_buft_name(type)) {
            return type;
        }
    }
    throw std::runtime_error("no device has the buffer type " + name);
}

// The pattern that llama.cpp itself has for --cpu-moe. An array of these ends with an empty one.
inline llama_model_tensor_buft_override experts_in(const std::string& name) {
    return {"\\.ffn_(up|down|gate|gate_up)_(ch|)exps", buffer_type(name)};
}
