// Which bytes of which file an address is: from /proc/self/maps, or from the GGUF files that
// the process has open.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace moetuner {

// An open file and what it is called. Shared by all places in it.
struct OpenFile {
    OpenFile(int descriptor, std::string called) : fd(descriptor), name(std::move(called)) {}
    ~OpenFile();
    OpenFile(const OpenFile&) = delete;
    OpenFile& operator=(const OpenFile&) = delete;

    const int fd;
    const std::string name;
};

struct FilePlace {
    std::shared_ptr<OpenFile> file;
    uint64_t offset = 0;
};

// The file that is mapped at `address`, and the offset of that byte in it. Throws Error when
// it is no file's mapping, or the file is not to be had any more (replaced, deleted: then
// /proc/self/map_files is tried, which needs privileges).
FilePlace place_of_address(const void* address);

// Where the tensor called `name` lies among the GGUF files this process has open. Throws
// Error when none holds it with `bytes` bytes.
FilePlace place_of_tensor(const char* name, uint64_t bytes);

} // namespace moetuner
