#include "ggml/resident.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

#include "gguf.h"

namespace moetuner {
namespace {

#ifndef MADV_POPULATE_READ // glibc before 2.35
constexpr int MADV_POPULATE_READ = 22;
#endif

struct Span {
    uintptr_t begin;
    uintptr_t end;
    uint64_t offset; // of `begin` in the file
};

uintptr_t page_size() {
    return static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
}

Span inward(uintptr_t address, uint64_t bytes, uint64_t offset) {
    const uintptr_t page = page_size();
    const uintptr_t begin = (address + page - 1) / page * page;
    return {begin, (address + bytes) / page * page, offset + (begin - address)};
}

void* pointer(uintptr_t address) {
    return reinterpret_cast<void*>(address); // an address of a mapping
}

// The mappings that belong to the same view of the file as `range`; the file may be mapped
// several times.
std::vector<Mapping> mappings_of(const MappedRange& range) {
    const uintptr_t base = reinterpret_cast<uintptr_t>(range.address) - range.place.offset;
    std::vector<Mapping> mappings = mappings_of_file_at(range.address);
    mappings.erase(std::remove_if(mappings.begin(), mappings.end(),
                                  [&](const Mapping& m) { return m.begin - m.offset != base; }),
                   mappings.end());
    return mappings;
}

// Ranges of all tensors but the experts, in whole pages, where they are mapped.
std::vector<Span> dense_spans(const OpenFile& file, const std::vector<Mapping>& mappings,
                              const std::set<uint64_t>& experts) {
    struct FreeHeader {
        void operator()(gguf_context* header) const { gguf_free(header); }
    };
    gguf_init_params parameters{};
    parameters.no_alloc = true;
    const std::string path = "/proc/self/fd/" + std::to_string(file.fd);
    const std::unique_ptr<gguf_context, FreeHeader> header(
        gguf_init_from_file(path.c_str(), parameters));
    std::vector<Span> spans;
    const uintptr_t page = page_size();
    const int64_t count = header ? gguf_get_n_tensors(header.get()) : 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t offset =
            gguf_get_data_offset(header.get()) + gguf_get_tensor_offset(header.get(), i);
        if (experts.count(offset) != 0) {
            continue;
        }
        const uint64_t first = offset / page * page;
        const uint64_t last =
            (offset + gguf_get_tensor_size(header.get(), i) + page - 1) / page * page;
        for (const Mapping& m : mappings) {
            const uint64_t from = std::max(first, m.offset);
            const uint64_t to = std::min<uint64_t>(last, m.offset + (m.end - m.begin));
            if (from < to) {
                spans.push_back({m.begin + (from - m.offset), m.begin + (to - m.offset), from});
            }
        }
    }
    std::sort(spans.begin(), spans.end(),
              [](const Span& a, const Span& b) { return a.begin < b.begin; });
    std::vector<Span> merged;
    for (const Span& span : spans) {
        if (!merged.empty() && span.begin <= merged.back().end) {
            merged.back().end = std::max(merged.back().end, span.end);
        } else {
            merged.push_back(span);
        }
    }
    return merged;
}

} // namespace

Residency make_dense_resident(const std::vector<MappedRange>& experts, bool lock) {
    Residency result;
    std::map<const OpenFile*, std::vector<const MappedRange*>> files;
    for (const MappedRange& range : experts) {
        files[range.place.file.get()].push_back(&range);
    }
    for (const auto& [file, ranges] : files) {
        const std::vector<Mapping> mappings = mappings_of(*ranges.front());
        // A page that is missing must not bring in its neighbours.
        for (const Mapping& m : mappings) {
            madvise(pointer(m.begin), m.end - m.begin, MADV_RANDOM);
        }
        std::set<uint64_t> offsets;
        for (const MappedRange* range : ranges) {
            offsets.insert(range->place.offset);
            const Span span = inward(reinterpret_cast<uintptr_t>(range->address), range->bytes,
                                     range->place.offset);
            if (span.begin >= span.end) {
                continue;
            }
            if (!mappings.empty()) { // pages stay while they are mapped
                madvise(pointer(span.begin), span.end - span.begin, MADV_DONTNEED);
            }
            posix_fadvise(file->fd, static_cast<off_t>(span.offset),
                          static_cast<off_t>(span.end - span.begin), POSIX_FADV_DONTNEED);
        }
        for (const Span& span : dense_spans(*file, mappings, offsets)) {
            const size_t bytes = span.end - span.begin;
            result.dense_bytes += bytes;
            // All reads at once, then wait for them.
            posix_fadvise(file->fd, static_cast<off_t>(span.offset), static_cast<off_t>(bytes),
                          POSIX_FADV_WILLNEED);
            if (lock && mlock(pointer(span.begin), bytes) == 0) {
                result.locked_bytes += bytes;
                continue;
            }
            if (lock) {
                result.lock_errno = errno;
            }
            madvise(pointer(span.begin), bytes, MADV_POPULATE_READ);
        }
    }
    return result;
}

} // namespace moetuner
