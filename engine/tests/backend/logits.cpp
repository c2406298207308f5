// Evaluates seeded tokens with llama.cpp and writes every row of logits, so that two runs can
// be compared bit by bit. Uses libllama's public functions only, as any program does.
//
//   moetuner_logits [OPTIONS] MODEL OUTPUT [MODEL OUTPUT]…
//
// Each pair has a context of its own. All models are loaded before the first is used. The
// output holds 32-bit floats: a row of as many values as the vocabulary has for each token.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

#include "experts.h"

namespace {

constexpr const char* usage =
    "usage: moetuner_logits [OPTIONS] MODEL OUTPUT [MODEL OUTPUT]...\n"
    "  --batches N,N,...  tokens of each batch (default 32)\n"
    "  --decode N         tokens that are evaluated one by one after that (default 8)\n"
    "  --seed N           of the tokens; the second pair has N + 1, and so on (default 1)\n"
    "  --threads N        (default 2)\n"
    "  --experts TYPE     name of the buffer type that experts go into (default: llama.cpp's choice)\n"
    "  --load-mode MODE   mmap, none, dio, mlock, mmap+mlock (default mmap)\n"
    "  --check-tensors    have llama.cpp validate all weights\n"
    "  --lora FILE        an adapter, with scale 1\n"
    "  --share            pairs with the same MODEL share one loaded model\n"
    "  --parallel         contexts compute at the same time, each in a thread of its own\n"
    "  --rounds N         load, evaluate and unload N times; the last one is written (default 1)\n"
    "  --node-by-node     with an evaluation callback that wants to see every node\n";

struct Options {
    std::vector<int> batches = {32};
    int decode = 8;
    unsigned seed = 1;
    int threads = 2;
    int rounds = 1;
    std::string experts;
    std::string lora;
    llama_load_mode load_mode = LLAMA_LOAD_MODE_MMAP;
    bool check_tensors = false;
    bool share = false;
    bool parallel = false;
    bool node_by_node = false;
    std::vector<std::pair<std::string, std::string>> pairs;
};

int number(const char* text) {
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (*text == '\0' || *end != '\0' || value < 0 || value > 1000000) {
        throw std::invalid_argument(std::string(text) + " is no number");
    }
    return static_cast<int>(value);
}

std::vector<int> numbers(const std::string& text) {
    std::vector<int> found;
    for (size_t begin = 0; begin <= text.size();) {
        const size_t end = std::min(text.find(',', begin), text.size());
        found.push_back(number(text.substr(begin, end - begin).c_str()));
        begin = end + 1;
    }
    return found;
}

Options parse(int argc, char** argv) {
    Options options;
    std::vector<std::string> files;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        const auto value = [&]() -> const char* {
            if (++i == argc) {
                throw std::invalid_argument(word + " wants a value");
            }
            return argv[i];
        };
        if (word == "--batches") {
            options.batches = numbers(value());
        } else if (word == "--decode") {
            options.decode = number(value());
        } else if (word == "--seed") {
            options.seed = static_cast<unsigned>(number(value()));
        } else if (word == "--threads") {
            options.threads = number(value());
        } else if (word == "--rounds") {
            options.rounds = number(value());
        } else if (word == "--experts") {
            options.experts = value();
        } else if (word == "--lora") {
            options.lora = value();
        } else if (word == "--load-mode") {
            options.load_mode = llama_load_mode_from_str(value());
        } else if (word == "--check-tensors") {
            options.check_tensors = true;
        } else if (word == "--share") {
            options.share = true;
        } else if (word == "--parallel") {
            options.parallel = true;
        } else if (word == "--node-by-node") {
            options.node_by_node = true;
        } else if (word.rfind("--", 0) == 0) {
            throw std::invalid_argument(word + " is no option");
        } else {
            files.push_back(word);
        }
    }
    if (files.empty() || files.size() % 2 != 0) {
        throw std::invalid_argument("pairs of MODEL and OUTPUT are wanted");
    }
    for (size_t i = 0; i < files.size(); i += 2) {
        options.pairs.emplace_back(files[i], files[i + 1]);
    }
    return options;
}

template <typename T, void (*release)(T*)> struct Free {
    void operator()(T* object) const { release(object); }
};
using Model = std::shared_ptr<llama_model>;
using Context = std::unique_ptr<llama_context, Free<llama_context, llama_free>>;
using Lora = std::unique_ptr<llama_adapter_lora, Free<llama_adapter_lora, llama_adapter_lora_free>>;

Model load(const std::string& path, const Options& options) {
    llama_model_params parameters = llama_model_default_params();
    // Repacked weights have other numerics.
    parameters.use_extra_bufts = false;
    parameters.n_gpu_layers = 0;
    parameters.load_mode = options.load_mode;
    parameters.check_tensors = options.check_tensors;
    llama_model_tensor_buft_override overrides[2] = {};
    if (!options.experts.empty()) {
        overrides[0] = experts_in(options.experts);
        parameters.tensor_buft_overrides = overrides;
    }
    Model model(llama_model_load_from_file(path.c_str(), parameters), llama_model_free);
    if (!model) {
        throw std::runtime_error(path + " cannot be loaded");
    }
    return model;
}

Context new_context(llama_model& model, const Options& options) {
    llama_context_params parameters = llama_context_default_params();
    int tokens = options.decode;
    int largest = 1;
    for (const int batch : options.batches) {
        tokens += batch;
        largest = std::max(largest, batch);
    }
    parameters.n_ctx = static_cast<uint32_t>(tokens + 255) / 256 * 256;
    parameters.n_batch = static_cast<uint32_t>(largest);
    parameters.n_ubatch = parameters.n_batch;
    parameters.n_threads = options.threads;
    parameters.n_threads_batch = options.threads;
    if (options.node_by_node) {
        parameters.cb_eval = [](ggml_tensor*, bool, void*) { return true; };
    }
    Context context(llama_init_from_model(&model, parameters));
    if (!context) {
        throw std::runtime_error("no context");
    }
    return context;
}

class File {
  public:
    explicit File(const std::string& path) : file_(std::fopen(path.c_str(), "wb")) {
        if (file_ == nullptr) {
            throw std::runtime_error(path + " cannot be written");
        }
    }
    ~File() { std::fclose(file_); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    void write(const float* values, size_t count) {
        if (std::fwrite(values, sizeof(float), count, file_) != count) {
            throw std::runtime_error("the output cannot be written");
        }
    }

  private:
    FILE* file_;
};

// Token `i` of a seed; any function that spreads will do.
llama_token token_at(unsigned seed, int i, int vocabulary) {
    uint64_t x = (uint64_t{seed} << 32) + static_cast<uint64_t>(i) + 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return static_cast<llama_token>((x ^ (x >> 31)) % static_cast<uint64_t>(vocabulary));
}

void evaluate(llama_context& context, const Options& options, unsigned seed,
              const std::string& output) {
    const llama_vocab* vocab = llama_model_get_vocab(llama_get_model(&context));
    const int vocabulary = llama_vocab_n_tokens(vocab);
    File file(output);
    std::vector<int> batches = options.batches;
    batches.insert(batches.end(), static_cast<size_t>(options.decode), 1);
    struct Batch {
        llama_batch batch;
        explicit Batch(int size) : batch(llama_batch_init(size, 0, 1)) {}
        ~Batch() { llama_batch_free(batch); }
    } holder(*std::max_element(batches.begin(), batches.end()));
    llama_batch& batch = holder.batch;
    int begin = 0;
    for (const int tokens : batches) {
        batch.n_tokens = tokens;
        for (int i = 0; i < batch.n_tokens; ++i) {
            batch.token[i] = token_at(seed, begin + i, vocabulary);
            batch.pos[i] = begin + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = 1;
        }
        const int status = llama_decode(&context, batch);
        if (status != 0) {
            throw std::runtime_error("llama_decode gave " + std::to_string(status));
        }
        for (int i = 0; i < batch.n_tokens; ++i) {
            file.write(llama_get_logits_ith(&context, i), static_cast<size_t>(vocabulary));
        }
        begin += tokens;
    }
}

void run(const Options& options) {
    std::map<std::string, Model> shared;
    std::vector<Model> models;
    std::vector<Lora> adapters;
    std::vector<Context> contexts;
    for (const auto& [path, output] : options.pairs) {
        Model& known = shared[path];
        if (!known || !options.share) {
            known = load(path, options);
        }
        models.push_back(known);
    }
    for (const Model& model : models) {
        contexts.push_back(new_context(*model, options));
        if (!options.lora.empty()) {
            adapters.emplace_back(llama_adapter_lora_init(model.get(), options.lora.c_str()));
            llama_adapter_lora* adapter = adapters.back().get();
            float scale = 1;
            if (adapter == nullptr ||
                llama_set_adapters_lora(contexts.back().get(), &adapter, 1, &scale) != 0) {
                throw std::runtime_error(options.lora + " cannot be used");
            }
        }
    }
    std::vector<std::string> errors(contexts.size());
    const auto evaluate_one = [&](size_t i) {
        try {
            evaluate(*contexts[i], options, options.seed + static_cast<unsigned>(i),
                     options.pairs[i].second);
        } catch (const std::exception& error) {
            errors[i] = error.what();
        }
    };
    std::vector<std::thread> threads;
    for (size_t i = 0; i < contexts.size(); ++i) {
        if (options.parallel) {
            threads.emplace_back(evaluate_one, i);
        } else {
            evaluate_one(i);
        }
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    for (const std::string& error : errors) {
        if (!error.empty()) {
            throw std::runtime_error(error);
        }
    }
}

} // namespace

int main(int argc, char** argv) {
    try {
        const Options options = parse(argc, argv);
        ggml_backend_load_all();
        llama_backend_init();
        for (int round = 0; round < options.rounds; ++round) {
            run(options);
        }
        llama_backend_free();
        return 0;
    } catch (const std::invalid_argument& error) {
        std::fprintf(stderr, "moetuner_logits: %s\n%s", error.what(), usage);
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "moetuner_logits: %s\n", error.what());
        return 1;
    }
}
