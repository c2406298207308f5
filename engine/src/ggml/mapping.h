// Which bytes of which file an address is: from /proc/self/maps, or from the GGUF files that
// the process has open.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <sys/types.h>
#include <utility>
#include <vector>

namespace moetuner {

// An open file and what it is called. Shared by all places in it.
struct OpenFile {
    OpenFile(int descriptor, std::string called, dev_t device, ino_t inode)
        : fd(descriptor), name(std::move(called)), identity(device, inode) {}
    ~OpenFile();
    OpenFile(const OpenFile&) = delete;
    OpenFile& operator=(const OpenFile&) = delete;

    const int fd;
    const std::string name;
    const std::pair<dev_t, ino_t> identity;
};

struct FilePlace {
    std::shared_ptr<OpenFile> file;
    uint64_t offset = 0;
};

// The model files that we have open: each once, however many matrices lie in it. Any thread.
class OpenFiles {
  public:
    // The file that is mapped at `address`, and the offset of that byte in it. Throws Error
    // when it is no file's mapping, or the file is not to be had any more (replaced, deleted:
    // then /proc/self/map_files is tried, which needs privileges).
    FilePlace place_of_address(const void* address);

    // Where the tensor called `name` lies among the GGUF files that this process has open;
    // descriptors in `ours` do not count. Throws Error when no file holds it with `bytes`
    // bytes, or more than one does.
    FilePlace place_of_tensor(const char* name, uint64_t bytes, std::set<int> ours);

  private:
    using Identity = std::pair<dev_t, ino_t>;
    // Where the tensors of a file are: read once, since a vocabulary makes it slow.
    struct Index {
        int64_t changed_ns = 0;
        struct Extent {
            uint64_t offset;
            uint64_t bytes;
        };
        std::map<std::string, Extent> tensors;
    };
    std::shared_ptr<OpenFile> keep(int fd, const std::string& name);
    const Index& index_of(int fd, const std::string& link);

    std::mutex mutex_;
    std::vector<std::weak_ptr<OpenFile>> files_;
    std::map<Identity, Index> indices_;
};

// Where a file is mapped, from its first byte on.
struct Mapping {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    uint64_t offset = 0; // of `begin` in the file
};

// All mappings of the file that is mapped at `address`; empty if there is none.
std::vector<Mapping> mappings_of_file_at(const void* address);

} // namespace moetuner
