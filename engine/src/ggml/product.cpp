#include "ggml/product.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#ifdef MOETUNER_TILED
#include "ggml-cpu/ggml-cpu-impl.h"
#endif

namespace moetuner {
namespace {

// Rows of a matrix that a thread takes at a time, as stock does for one token.
constexpr int64_t chunk_rows = 64;
// Rows of weights, and of the right-hand side, that are multiplied while they are in the
// first-level cache. Stock's.
constexpr int64_t block = 16;

int64_t chunks_of(const Product& product) {
    return (product.node->src[0]->ne[1] + chunk_rows - 1) / chunk_rows;
}

float* result(const ggml_tensor& node, const Row& row) {
    return reinterpret_cast<float*>(static_cast<std::byte*>(node.data) +
                                    static_cast<size_t>(row.column) * node.nb[1] +
                                    static_cast<size_t>(row.token) * node.nb[2]);
}

// Weight rows [begin, end) of one expert times all rows of the part.
void multiply(const Part& part, const std::byte* weights, int64_t begin, int64_t end) {
    const Product& product = *part.product;
    const ggml_tensor& a = *product.node->src[0];
    const auto width = static_cast<int>(a.ne[0]);
    for (uint32_t first = 0; first < part.count; first += block) {
        const uint32_t last = std::min<uint32_t>(part.count, first + block);
        for (int64_t from = begin; from < end; from += block) {
            const int64_t to = std::min(end, from + block);
            for (uint32_t i = first; i < last; ++i) {
                const std::byte* right = product.right->row(part.rows[i]);
                float* out = result(*product.node, part.rows[i]);
                for (int64_t r = from; r < to; ++r) {
                    product.traits->vec_dot(width, out + r, 0,
                                            weights + static_cast<size_t>(r) * a.nb[1], 0, right,
                                            0, 1);
                }
            }
        }
    }
}

} // namespace

void Routing::read(const ggml_tensor& ids, uint32_t count) {
    const auto id = [&ids](int64_t column, int64_t token) {
        int32_t expert;
        std::memcpy(&expert,
                    static_cast<const std::byte*>(ids.data) +
                        static_cast<size_t>(token) * ids.nb[1] +
                        static_cast<size_t>(column) * ids.nb[0],
                    sizeof expert);
        return expert;
    };
    constexpr uint32_t unused = UINT32_MAX;
    std::vector<uint32_t> place(count, unused);
    experts.clear();
    begin.assign(1, 0); // first how many each has, shifted by one
    for (int64_t token = 0; token < ids.ne[1]; ++token) {
        for (int64_t column = 0; column < ids.ne[0]; ++column) {
            const int32_t expert = id(column, token);
            GGML_ASSERT(expert >= 0 && static_cast<uint32_t>(expert) < count);
            uint32_t& at = place[static_cast<size_t>(expert)];
            if (at == unused) {
                at = static_cast<uint32_t>(experts.size());
                experts.push_back(static_cast<uint32_t>(expert));
                begin.push_back(0);
            }
            ++begin[at + 1];
        }
    }
    for (size_t i = 1; i < begin.size(); ++i) {
        begin[i] += begin[i - 1];
    }
    rows.resize(begin.back());
    std::vector<uint32_t> next(begin.begin(), begin.end() - 1);
    for (int64_t token = 0; token < ids.ne[1]; ++token) {
        for (int64_t column = 0; column < ids.ne[0]; ++column) {
            const uint32_t at = place[static_cast<size_t>(id(column, token))];
            rows[next[at]++] = {static_cast<int32_t>(column), static_cast<int32_t>(token)};
        }
    }
}

void Scratch::Free::operator()(void* memory) const {
    std::free(memory);
}

std::byte* Scratch::take(size_t bytes) {
    if (used_ == blocks_.size()) {
        blocks_.emplace_back();
    }
    Block& found = blocks_[used_++];
    if (found.bytes < bytes) {
        const size_t wanted = (bytes + 63) / 64 * 64;
        found.memory.reset();
        found.bytes = 0;
        found.memory.reset(std::aligned_alloc(64, wanted));
        if (!found.memory) {
            throw std::bad_alloc();
        }
        found.bytes = wanted;
    }
    return static_cast<std::byte*>(found.memory.get());
}

// Stock splits every row between the threads; the result is the same, because blocks are
// quantised independently.
void RightSide::quantize(int ith, int nth) const {
    const int64_t rows = b->ne[1] * b->ne[2];
    const auto some = [this](int64_t row, int64_t begin, int64_t end) {
        const auto* input = reinterpret_cast<const float*>(
            static_cast<const std::byte*>(b->data) +
            static_cast<size_t>(row % b->ne[1]) * b->nb[1] +
            static_cast<size_t>(row / b->ne[1]) * b->nb[2]);
        if (end > begin) {
            from_float(input + begin,
                       data + static_cast<size_t>(row) * row_size + ggml_row_size(type, begin),
                       end - begin);
        }
    };
    if (rows >= nth) {
        for (int64_t r = rows * ith / nth; r < rows * (ith + 1) / nth; ++r) {
            some(r, 0, b->ne[0]);
        }
        return;
    }
    const int64_t unit = ggml_blck_size(type);
    const int64_t units = b->ne[0] / unit;
    for (int64_t r = 0; r < rows; ++r) {
        some(r, units * ith / nth * unit, units * (ith + 1) / nth * unit);
    }
}

const std::byte* RightSide::row(const Row& row) const {
    const int64_t i11 = row.column % b->ne[1];
    if (from_float != nullptr) {
        return data + static_cast<size_t>(i11 + row.token * b->ne[1]) * row_size;
    }
    return static_cast<const std::byte*>(b->data) + static_cast<size_t>(i11) * b->nb[1] +
           static_cast<size_t>(row.token) * b->nb[2];
}

void Task::add(const Part& part, bool ready) {
    Phase& phase = phases_[ready ? 0 : 1];
    if (part.product->tiled && part.count >= cpu_.tiled_rows) {
        phase.tiled.push_back(part);
        return;
    }
    phase.plain.push_back(part);
    phase.end.push_back((phase.end.empty() ? 0 : phase.end.back()) + chunks_of(*part.product));
}

void Task::run(int ith, int nth) {
    for (Phase& phase : phases_) {
        run_plain(phase);
        run_tiled(phase, ith, nth);
    }
}

void Task::run_plain(Phase& phase) {
    const int64_t total = phase.end.empty() ? 0 : phase.end.back();
    for (int64_t n; (n = phase.next.fetch_add(1, std::memory_order_relaxed)) < total;) {
        const auto found = std::upper_bound(phase.end.begin(), phase.end.end(), n);
        const Part& part = phase.plain[static_cast<size_t>(found - phase.end.begin())];
        const ggml_tensor& a = *part.product->node->src[0];
        const int64_t chunk = n - (*found - chunks_of(*part.product));
        const int64_t begin = chunk * chunk_rows;
        const int64_t end = std::min(begin + chunk_rows, a.ne[1]);
        const unsigned slice = part.product->matrix->slice;
        // Piece by piece: the rows that are there need not wait for the others.
        if (part.units->wait_arrived(part.entry, slice,
                                     static_cast<uint64_t>(end) * a.nb[1]) == 0) {
            part.product->failed.store(true, std::memory_order_relaxed);
            continue;
        }
        multiply(part, static_cast<const std::byte*>(part.units->data(part.entry, slice)), begin,
                 end);
    }
}

// Each thread has its share of every expert's rows, as in stock.
void Task::run_tiled(const Phase& phase, int ith, int nth) const {
#ifdef MOETUNER_TILED
    for (const Part& part : phase.tiled) {
        const void* slice = part.units->wait(part.entry, part.product->matrix->slice);
        if (slice == nullptr) {
            part.product->failed.store(true, std::memory_order_relaxed);
            continue;
        }
        ggml_tensor weights = *part.product->node->src[0];
        weights.data = const_cast<void*>(slice);
        ggml_tensor node = *part.product->node;
        node.src[0] = &weights;
        ggml_compute_params parameters{};
        parameters.ith = ith;
        parameters.nth = nth;
        parameters.wdata = part.product->right->data;
        if (!cpu_.tiled(&parameters, &node, 0, part.count,
                        reinterpret_cast<const int32_t*>(part.rows), scratch_)) {
            // Stock would go the plain way then.
            const int64_t rows = weights.ne[1];
            multiply(part, static_cast<const std::byte*>(slice), rows * ith / nth,
                     rows * (ith + 1) / nth);
        }
    }
#else
    (void)phase, (void)ith, (void)nth, (void)scratch_;
    GGML_ASSERT(phase.tiled.empty());
#endif
}

} // namespace moetuner
