// Products of the shapes given, computed by the plugin's device and by the CPU's from the same
// file: every result must be the same, bit for bit.
//
//   moetuner_operations [--threads N] < CASES
//
// A case is a line: type of the weights, experts, experts used, 1 if all that a token uses
// multiply the same row, rows of weights, tokens, columns. For each one a model of one matrix
// is written below $TMPDIR, mapped, used and unloaded. Cases whose experts have no room in
// MOETUNER_CACHE_MIB are counted, not computed. At the end: what must not be taken is not.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "gguf.h"

namespace {

constexpr const char* matrix_name = "blk.0.ffn_up_exps.weight";
constexpr int pool_rows = 13; // a prime: experts begin at different ones

struct Case {
    ggml_type type = GGML_TYPE_COUNT;
    int experts = 0;
    int used = 0;
    bool broadcast = false;
    int64_t rows = 0;
    int64_t tokens = 0;
    int64_t columns = 0;
    unsigned number = 0;
};

[[noreturn]] void fail(const std::string& text) {
    throw std::runtime_error(text);
}

ggml_type type_named(const std::string& name) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const auto type = static_cast<ggml_type>(i);
        if (ggml_type_name(type) != nullptr && name == ggml_type_name(type)) {
            return type;
        }
    }
    fail(name + " is no type of ggml");
}

template <typename T, void (*release)(T*)> struct Free {
    void operator()(T* object) const { release(object); }
};
using Context = std::unique_ptr<ggml_context, Free<ggml_context, ggml_free>>;
using Header = std::unique_ptr<gguf_context, Free<gguf_context, gguf_free>>;
using Buffer = std::unique_ptr<ggml_backend_buffer, Free<ggml_backend_buffer, ggml_backend_buffer_free>>;
using Backend = std::unique_ptr<ggml_backend, Free<ggml_backend, ggml_backend_free>>;

Context new_context() {
    return Context(ggml_init({size_t{64} * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
}

// ggml builds tables for half a minute before it quantises to these.
bool slow_to_quantize(ggml_type type) {
    switch (type) {
    case GGML_TYPE_IQ1_S:
    case GGML_TYPE_IQ1_M:
    case GGML_TYPE_IQ2_XXS:
    case GGML_TYPE_IQ2_XS:
    case GGML_TYPE_IQ2_S:
    case GGML_TYPE_IQ3_XXS:
    case GGML_TYPE_IQ3_S:
        return true;
    default:
        return false;
    }
}

// Rows of weights, made once for each type and width.
const std::vector<char>& pool_of(ggml_type type, int64_t columns) {
    static std::map<std::pair<ggml_type, int64_t>, std::vector<char>> known;
    std::vector<char>& pool = known[{type, columns}];
    if (!pool.empty()) {
        return pool;
    }
    pool.resize(ggml_row_size(type, columns) * pool_rows);
    std::mt19937 random(1);
    if (slow_to_quantize(type)) {
        // All bits mean something; below 0x40 a scale in half precision is finite.
        for (char& byte : pool) {
            byte = static_cast<char>(random() % 0x40);
        }
    } else {
        std::uniform_real_distribution<float> values(-1, 1);
        std::vector<float> plain(static_cast<size_t>(pool_rows * columns));
        for (float& value : plain) {
            value = values(random);
        }
        const std::vector<float> importance(static_cast<size_t>(columns), 1.0F);
        ggml_quantize_chunk(type, plain.data(), pool.data(), 0, pool_rows, columns,
                            importance.data());
    }
    return pool;
}

// A GGUF file with the matrix of a case, mapped as llama.cpp maps it.
class Model {
  public:
    explicit Model(const Case& given) {
        const char* below = std::getenv("TMPDIR");
        path_ = std::string(below != nullptr ? below : "/tmp") + "/operations-" +
                std::to_string(getpid()) + ".gguf";
        write(given);
        const int fd = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
        struct stat status {};
        if (fd < 0 || fstat(fd, &status) != 0) {
            fail(path_ + " cannot be read");
        }
        size_ = static_cast<size_t>(status.st_size);
        memory_ = mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
        close(fd);
        if (memory_ == MAP_FAILED) {
            fail(path_ + " cannot be mapped");
        }
    }
    ~Model() {
        munmap(memory_, size_);
        unlink(path_.c_str());
    }
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;

    void* memory() const { return memory_; }
    size_t size() const { return size_; }
    void* matrix() const { return static_cast<char*>(memory_) + offset_; }

  private:
    void write(const Case& given) {
        const Context context = new_context();
        // So that the matrix begins anywhere in a page.
        ggml_tensor* before = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32,
                                                 1 + (given.number * 389) % 2048);
        ggml_set_name(before, "output_norm.weight");
        ggml_tensor* matrix = ggml_new_tensor_3d(context.get(), given.type, given.columns,
                                                 given.rows, given.experts);
        ggml_set_name(matrix, matrix_name);
        std::vector<float> ones(static_cast<size_t>(before->ne[0]), 1.0F);
        before->data = ones.data();
        const std::vector<char>& pool = pool_of(given.type, given.columns);
        const size_t row = ggml_row_size(given.type, given.columns);
        std::vector<char> bytes(ggml_nbytes(matrix));
        for (int64_t e = 0; e < given.experts; ++e) {
            for (int64_t r = 0; r < given.rows; ++r) {
                const auto from = static_cast<size_t>((r * 7 + e) % pool_rows);
                std::memcpy(&bytes[static_cast<size_t>(e * given.rows + r) * row],
                            &pool[from * row], row);
            }
        }
        matrix->data = bytes.data();
        const Header header(gguf_init_empty());
        gguf_add_tensor(header.get(), before);
        gguf_add_tensor(header.get(), matrix);
        if (!gguf_write_to_file(header.get(), path_.c_str(), false)) {
            fail(path_ + " cannot be written");
        }
        offset_ = gguf_get_meta_size(header.get()) + gguf_get_tensor_offset(header.get(), 1);
    }

    std::string path_;
    void* memory_ = nullptr;
    size_t size_ = 0;
    size_t offset_ = 0;
};

struct Device {
    ggml_backend_dev_t device;
    int threads;

    Backend backend() const {
        Backend made(ggml_backend_dev_init(device, nullptr));
        if (made) {
            const auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(
                ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device),
                                                  "ggml_backend_set_n_threads"));
            set(made.get(), threads);
        }
        return made;
    }
};

// One product in the device's memory, its weights in the mapping.
class Product {
  public:
    Product(const Device& device, const Case& given, const Model& model)
        : device_(device), context_(new_context()),
          weights_(ggml_backend_dev_buffer_from_host_ptr(device.device, model.memory(),
                                                         model.size(), model.size())) {
        ggml_backend_buffer_set_usage(weights_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_context* c = context_.get();
        matrix_ = ggml_new_tensor_3d(c, given.type, given.columns, given.rows, given.experts);
        ggml_set_name(matrix_, matrix_name);
        if (ggml_backend_tensor_alloc(weights_.get(), matrix_, model.matrix()) !=
            GGML_STATUS_SUCCESS) {
            fail("the matrix was refused");
        }
        // A token's experts are a part of a longer row, as the router's choice is.
        ggml_tensor* ids = ggml_new_tensor_2d(c, GGML_TYPE_I32, given.experts, given.tokens);
        ggml_tensor* right = ggml_new_tensor_3d(c, GGML_TYPE_F32, given.columns,
                                                given.broadcast ? 1 : given.used, given.tokens);
        node_ = ggml_mul_mat_id(c, matrix_, right,
                                ggml_view_2d(c, ids, given.used, given.tokens, ids->nb[1], 0));
        memory_.reset(ggml_backend_alloc_ctx_tensors_from_buft(
            c, ggml_backend_dev_buffer_type(device.device)));
        if (!memory_) {
            fail("no memory");
        }
        fill(given, ids, right);
    }

    bool supported() const { return ggml_backend_dev_supports_op(device_.device, node_); }
    const ggml_tensor* node() const { return node_; }
    ggml_context* context() const { return context_.get(); }

    // Empty: no room for the experts.
    std::vector<float> compute() const {
        const Backend backend = device_.backend();
        if (!backend) {
            return {};
        }
        ggml_cgraph* graph = ggml_new_graph(context_.get());
        ggml_build_forward_expand(graph, node_);
        if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
            fail("the product failed");
        }
        std::vector<float> values(static_cast<size_t>(ggml_nelements(node_)));
        ggml_backend_tensor_get(node_, values.data(), 0, ggml_nbytes(node_));
        return values;
    }

  private:
    void fill(const Case& given, ggml_tensor* ids, ggml_tensor* right) const {
        std::mt19937 random(given.number);
        std::vector<int32_t> experts(static_cast<size_t>(given.experts));
        for (int32_t i = 0; i < given.experts; ++i) {
            experts[static_cast<size_t>(i)] = i;
        }
        for (int64_t token = 0; token < given.tokens; ++token) {
            std::shuffle(experts.begin(), experts.end(), random);
            ggml_backend_tensor_set(ids, experts.data(), static_cast<size_t>(token) * ids->nb[1],
                                    experts.size() * sizeof(int32_t));
        }
        std::uniform_real_distribution<float> values(-1, 1);
        std::vector<float> row(static_cast<size_t>(ggml_nelements(right)));
        for (float& value : row) {
            value = values(random);
        }
        ggml_backend_tensor_set(right, row.data(), 0, ggml_nbytes(right));
        // What is not computed shows.
        const std::vector<float> nothing(static_cast<size_t>(ggml_nelements(node_)),
                                         std::numeric_limits<float>::quiet_NaN());
        ggml_backend_tensor_set(node_, nothing.data(), 0, ggml_nbytes(node_));
    }

    Device device_;
    Context context_;
    Buffer weights_;
    Buffer memory_;
    ggml_tensor* matrix_ = nullptr;
    ggml_tensor* node_ = nullptr;
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void expect(bool value, const char* what) {
    if (!value) {
        fail(what);
    }
}

// What resembles a product of ours and is none: nobody may take it.
void check_refusals(const Device& ours) {
    const Case given{GGML_TYPE_Q8_0, 4, 2, true, 32, 3, 64, 1};
    const Model model(given);
    const Product product(ours, given, model);
    ggml_context* c = product.context();
    const ggml_tensor& good = *product.node();
    const auto supported = [&](const ggml_tensor* node) {
        return ggml_backend_dev_supports_op(ours.device, node);
    };
    expect(supported(&good), "a product of experts is not taken");

    ggml_tensor other = *good.src[0];
    ggml_tensor node = good;
    node.src[0] = &other;
    ggml_set_name(&other, "blk.0.ffn_up_exps.bias");
    expect(!supported(&node), "a matrix that is no expert's is taken");
    ggml_set_name(&other, matrix_name);
    expect(supported(&node), "a copy of the good node is not taken");
    other.buffer = nullptr;
    expect(!supported(&node), "a matrix in no buffer is taken");
    const Buffer plain(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), 64));
    other.buffer = plain.get();
    expect(!supported(&node), "a matrix in the CPU's memory is taken");
    other = *good.src[0];
    other.view_src = good.src[0];
    expect(!supported(&node), "a view of a matrix is taken");
    other = *good.src[0];
    other.nb[2] *= 2;
    expect(!supported(&node), "a matrix with gaps is taken");
    other = *good.src[0];
    ggml_tensor right = *good.src[1];
    node.src[1] = &right;
    right.type = GGML_TYPE_F16;
    expect(!supported(&node), "a right-hand side in half precision is taken");
    right = *good.src[1];
    right.nb[0] = 8;
    expect(!supported(&node), "a right-hand side with gaps is taken");

    ggml_tensor* value = ggml_new_tensor_2d(c, GGML_TYPE_F32, 32, 3);
    expect(!supported(ggml_scale(c, value, 2)), "somebody else's value is scaled");
    ggml_tensor* dense = ggml_new_tensor_2d(c, GGML_TYPE_F32, 32, 32);
    expect(!supported(ggml_mul_mat(c, dense, value)), "a product of a dense matrix is taken");
    ggml_tensor* result = ggml_mul_mat_id(c, good.src[0], good.src[1], good.src[2]);
    expect(supported(ggml_silu(c, result)), "what lies between two products is not taken");
    ggml_tensor* weights = ggml_new_tensor_3d(c, GGML_TYPE_F32, 1, 2, 3);
    expect(!supported(ggml_mul(c, result, weights)), "the router's weights are multiplied");
    expect(!supported(ggml_soft_max(c, result)), "an operation of no expert's is taken");
}

ggml_backend_dev_t device_named(const char* name) {
    ggml_backend_dev_t device = ggml_backend_dev_by_name(name);
    if (device == nullptr) {
        fail(std::string("no device ") + name);
    }
    return device;
}

void run(int threads) {
    ggml_backend_load_all();
    const Device ours{device_named("MOETUNER"), threads};
    const Device cpu{device_named("CPU"), threads};
    unsigned number = 0;
    unsigned without_room = 0;
    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream words(line);
        std::string type;
        Case given;
        words >> type >> given.experts >> given.used >> given.broadcast >> given.rows >>
            given.tokens >> given.columns;
        if (!words) {
            fail(line + ": no case");
        }
        given.type = type_named(type);
        given.number = number++;
        try {
            const Model model(given);
            const Product product(ours, given, model);
            expect(product.supported(), "not taken");
            const std::vector<float> got = product.compute();
            if (got.empty()) {
                ++without_room;
                continue;
            }
            const std::vector<float> want = Product(cpu, given, model).compute();
            expect(std::all_of(want.begin(), want.end(), [](float v) { return std::isfinite(v); }),
                   "the CPU's result is no number: the case shows nothing");
            expect(same(got, want), "other bits than the CPU's");
        } catch (const std::exception& error) {
            fail(line + ": " + error.what());
        }
    }
    check_refusals(ours);
    std::printf("%u cases equal, %u without room\n", number - without_room, without_room);
}

} // namespace

int main(int argc, char** argv) {
    int threads = 2;
    if (argc == 3 && std::strcmp(argv[1], "--threads") == 0) {
        threads = std::atoi(argv[2]);
    } else if (argc != 1) {
        std::fprintf(stderr, "usage: moetuner_operations [--threads N] < CASES\n");
        return 2;
    }
    try {
        run(threads);
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "moetuner_operations: %s\n", error.what());
        return 1;
    }
}
