// Evaluates tokens with llama.cpp and writes which experts its router chose, as an evaluation
// callback sees them: what a trace of the plugin has to be equal to. Uses public functions only.
//
//   moetuner_router MODEL OUTPUT THREADS BUFFER-TYPE|- TOKENS...
//
// Each further number is a batch of so many tokens. The output has a line for each token in
// each layer: evaluation, layer, row, rows, and the experts.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

#include "experts.h"

namespace {

struct Output {
    FILE* file;
    int evaluation = 0;
};

bool is_choice(const ggml_tensor* node) {
    return std::strncmp(node->name, "ffn_moe_topk-", 13) == 0;
}

bool look(ggml_tensor* node, bool ask, void* data) {
    if (ask || !is_choice(node)) {
        return is_choice(node);
    }
    const Output& output = *static_cast<Output*>(data);
    std::vector<int32_t> ids(static_cast<size_t>(node->ne[0]));
    for (int64_t row = 0; row < node->ne[1]; ++row) {
        ggml_backend_tensor_get(node, ids.data(), static_cast<size_t>(row) * node->nb[1],
                                ids.size() * sizeof(int32_t));
        std::fprintf(output.file, "%d %s %d %d", output.evaluation, node->name + 13,
                     static_cast<int>(row), static_cast<int>(node->ne[1]));
        for (const int32_t id : ids) {
            std::fprintf(output.file, " %d", id);
        }
        std::fputc('\n', output.file);
    }
    return true;
}

void run(const std::string& path, Output& output, int threads, const std::string& experts,
         const std::vector<int>& batches) {
    llama_model_params model_parameters = llama_model_default_params();
    model_parameters.use_extra_bufts = false; // repacked weights have other numerics
    model_parameters.n_gpu_layers = 0;
    llama_model_tensor_buft_override overrides[2] = {};
    if (experts != "-") {
        overrides[0] = experts_in(experts);
        model_parameters.tensor_buft_overrides = overrides;
    }
    const std::unique_ptr<llama_model, void (*)(llama_model*)> model(
        llama_model_load_from_file(path.c_str(), model_parameters), llama_model_free);
    if (!model) {
        throw std::runtime_error(path + " cannot be loaded");
    }
    llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx = 1024;
    parameters.n_batch = parameters.n_ubatch = 256;
    parameters.n_threads = parameters.n_threads_batch = threads;
    parameters.cb_eval = look;
    parameters.cb_eval_user_data = &output;
    const std::unique_ptr<llama_context, void (*)(llama_context*)> context(
        llama_init_from_model(model.get(), parameters), llama_free);
    if (!context) {
        throw std::runtime_error("no context");
    }
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
    uint64_t seed = 42;
    for (const int tokens : batches) {
        std::vector<llama_token> batch;
        for (int i = 0; i < tokens; ++i) {
            seed = seed * 6364136223846793005 + 1442695040888963407;
            batch.push_back(static_cast<llama_token>((seed >> 33) %
                                                     static_cast<uint64_t>(vocabulary)));
        }
        // Logits of the last token only, as every program asks for.
        if (llama_decode(context.get(), llama_batch_get_one(batch.data(), tokens)) != 0) {
            throw std::runtime_error("llama_decode failed");
        }
        ++output.evaluation;
    }
}

} // namespace

int main(int argc, char** argv) {
    if (argc < 6) {
        std::fputs("usage: moetuner_router MODEL OUTPUT THREADS BUFFER-TYPE|- TOKENS...\n",
                   stderr);
        return 2;
    }
    std::vector<int> batches;
    for (int i = 5; i < argc; ++i) {
        batches.push_back(std::atoi(argv[i]));
    }
    Output output{std::fopen(argv[2], "w")};
    if (output.file == nullptr) {
        std::fprintf(stderr, "moetuner_router: %s cannot be written\n", argv[2]);
        return 1;
    }
    try {
        ggml_backend_load_all();
        llama_backend_init();
        run(argv[1], output, std::atoi(argv[3]), argv[4], batches);
        llama_backend_free();
    } catch (const std::exception& error) {
        std::fprintf(stderr, "moetuner_router: %s\n", error.what());
        return 1;
    }
    return std::fclose(output.file) == 0 ? 0 : 1;
}
