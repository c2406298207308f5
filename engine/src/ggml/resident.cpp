#include "ggml/resident.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <map>
#include <set>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

#include "gguf.h"

namespace moetuner {
namespace {

struct Span {
    uintptr_t begin;
    uintptr_t end;
};

Span outward(uintptr_t address, uint64_t bytes, uintptr_t page) {
    return {address / page * page, (address + bytes + page - 1) / page * page};
}

Span inward(uintptr_t address, uint64_t bytes, uintptr_t page) {
    return {(address + page - 1) / page * page, (address + bytes) / page * page};
}

void* pointer(uintptr_t address) {
    return reinterpret_cast<void*>(address); // an address of a mapping, from its file's header
}

// Whether this address is where the file's mapping has this offset.
bool mapped(const MappedRange& range) {
    try {
        const FilePlace place = place_of_address(range.address);
        return place.offset == range.place.offset && place.file->name == range.place.file->name;
    } catch (const std::exception&) {
        return false;
    }
}

} // namespace

Residency make_dense_resident(const std::vector<MappedRange>& experts, bool lock) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    Residency result;
    std::map<std::string, const MappedRange*> files; // one range of each
    std::map<std::string, std::set<uint64_t>> offsets;
    for (const MappedRange& range : experts) {
        files.emplace(range.place.file->name, &range);
        offsets[range.place.file->name].insert(range.place.offset);
    }
    for (const auto& [name, range] : files) {
        const bool is_mapped = mapped(*range);
        const uintptr_t base = reinterpret_cast<uintptr_t>(range->address) - range->place.offset;
        for (const MappedRange& expert : experts) {
            if (expert.place.file->name != name) {
                continue;
            }
            if (is_mapped) {
                const Span span =
                    inward(reinterpret_cast<uintptr_t>(expert.address), expert.bytes, page);
                madvise(pointer(span.begin), span.end - span.begin, MADV_RANDOM);
                madvise(pointer(span.begin), span.end - span.begin, MADV_DONTNEED);
            }
            posix_fadvise(expert.place.file->fd, static_cast<off_t>(expert.place.offset),
                          static_cast<off_t>(expert.bytes), POSIX_FADV_DONTNEED);
        }
        if (!is_mapped) {
            continue; // dense weights were copied to memory of their own
        }
        const std::string path = "/proc/self/fd/" + std::to_string(range->place.file->fd);
        gguf_init_params parameters{};
        parameters.no_alloc = true;
        gguf_context* header = gguf_init_from_file(path.c_str(), parameters);
        if (header == nullptr) {
            continue;
        }
        const uint64_t data = gguf_get_data_offset(header);
        const int64_t count = gguf_get_n_tensors(header);
        for (int64_t i = 0; i < count; ++i) {
            const uint64_t offset = data + gguf_get_tensor_offset(header, i);
            if (offsets[name].count(offset) != 0) {
                continue;
            }
            const uint64_t bytes = gguf_get_tensor_size(header, i);
            const Span span = outward(base + offset, bytes, page);
            if (madvise(pointer(span.begin), span.end - span.begin, MADV_WILLNEED) != 0) {
                continue; // unmapped: it went to a GPU
            }
            result.dense_bytes += bytes;
            if (lock && mlock(pointer(span.begin), span.end - span.begin) == 0) {
                result.locked_bytes += bytes;
            } else if (lock) {
                result.lock_errno = errno;
            }
        }
        gguf_free(header);
    }
    return result;
}

} // namespace moetuner
