#include "ggml/mapping.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <fstream>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "gguf.h"
#include "io/log.h"

namespace moetuner {
namespace {

struct Range {
    uint64_t start = 0;
    uint64_t end = 0;
    uint64_t offset = 0;
    unsigned major = 0;
    unsigned minor = 0;
    uint64_t inode = 0;
    std::string path;
};

bool parse(const std::string& line, Range& range) {
    int at = 0;
    char permissions[8];
    if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %7s %" SCNx64 " %x:%x %" SCNu64 " %n",
                    &range.start, &range.end, permissions, &range.offset, &range.major,
                    &range.minor, &range.inode, &at) < 7) {
        return false;
    }
    range.path = line.substr(static_cast<size_t>(at));
    return true;
}

// /proc/self/maps writes a newline in a path as \012.
std::string unescaped(const std::string& path) {
    std::string out;
    for (size_t i = 0; i < path.size(); ++i) {
        if (path.compare(i, 4, "\\012") == 0) {
            out += '\n';
            i += 3;
        } else {
            out += path[i];
        }
    }
    return out;
}

int open_same(const std::string& path, const Range& range) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status {};
    if (fd >= 0 && fstat(fd, &status) == 0 && status.st_ino == range.inode) {
        // The device is not compared: btrfs and overlayfs show another one in maps.
        return fd;
    }
    if (fd >= 0) {
        close(fd);
    }
    return -1;
}

// False: no file is mapped there.
bool find_mapped(const void* address, Range& range) {
    const auto wanted = reinterpret_cast<uint64_t>(address);
    std::ifstream maps("/proc/self/maps");
    std::string line;
    while (std::getline(maps, line)) {
        if (parse(line, range) && wanted >= range.start && wanted < range.end) {
            return range.inode != 0;
        }
    }
    return false;
}

bool is_gguf(int fd) {
    char magic[4];
    return pread(fd, magic, 4, 0) == 4 && std::memcmp(magic, "GGUF", 4) == 0;
}

struct FreeHeader {
    void operator()(gguf_context* header) const { gguf_free(header); }
};
struct CloseDirectory {
    void operator()(DIR* directory) const { closedir(directory); }
};
struct Descriptor {
    explicit Descriptor(int number) : fd(number) {}
    ~Descriptor() {
        if (fd >= 0) {
            close(fd);
        }
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    int release() { return std::exchange(fd, -1); }
    int fd;
};

} // namespace

OpenFile::~OpenFile() {
    close(fd);
}

// Takes the descriptor over. The lock is held.
std::shared_ptr<OpenFile> OpenFiles::keep(int fd, const std::string& name) {
    Descriptor descriptor(fd);
    struct stat status {};
    if (fstat(fd, &status) != 0) {
        throw Error(name + ": " + std::strerror(errno));
    }
    std::shared_ptr<OpenFile> found;
    files_.erase(std::remove_if(files_.begin(), files_.end(),
                                [&](const std::weak_ptr<OpenFile>& weak) {
                                    const std::shared_ptr<OpenFile> file = weak.lock();
                                    if (file && file->identity ==
                                                    Identity(status.st_dev, status.st_ino)) {
                                        found = file;
                                    }
                                    return !file;
                                }),
                 files_.end());
    if (!found) {
        found = std::make_shared<OpenFile>(descriptor.release(), name, status.st_dev,
                                           status.st_ino);
        files_.push_back(found);
    }
    return found;
}

FilePlace OpenFiles::place_of_address(const void* address) {
    Range range;
    if (!find_mapped(address, range)) {
        throw Error("expert weights lie in memory that is no mapping of a file");
    }
    const std::string path = unescaped(range.path);
    int fd = open_same(path, range);
    if (fd < 0) {
        char link[64];
        std::snprintf(link, sizeof link, "/proc/self/map_files/%" PRIx64 "-%" PRIx64, range.start,
                      range.end);
        fd = open_same(link, range);
    }
    if (fd < 0) {
        throw Error(path + " is mapped but cannot be opened again (replaced or deleted?)");
    }
    const std::lock_guard<std::mutex> guard(mutex_);
    return {keep(fd, path), range.offset + (reinterpret_cast<uint64_t>(address) - range.start)};
}

// The lock is held.
const OpenFiles::Index& OpenFiles::index_of(int fd, const std::string& link) {
    struct stat status {};
    fstat(fd, &status);
    Index& index = indices_[{status.st_dev, status.st_ino}];
    const int64_t changed = status.st_mtim.tv_sec * 1000000000LL + status.st_mtim.tv_nsec;
    if (index.changed_ns == changed) {
        return index;
    }
    index = {changed, {}};
    gguf_init_params parameters{};
    parameters.no_alloc = true;
    const std::unique_ptr<gguf_context, FreeHeader> header(
        is_gguf(fd) ? gguf_init_from_file(link.c_str(), parameters) : nullptr);
    const int64_t count = header ? gguf_get_n_tensors(header.get()) : 0;
    for (int64_t i = 0; i < count; ++i) {
        index.tensors[gguf_get_tensor_name(header.get(), i)] = {
            gguf_get_data_offset(header.get()) + gguf_get_tensor_offset(header.get(), i),
            gguf_get_tensor_size(header.get(), i)};
    }
    return index;
}

FilePlace OpenFiles::place_of_tensor(const char* name, uint64_t bytes, std::set<int> ours) {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (const std::weak_ptr<OpenFile>& weak : files_) {
        if (const std::shared_ptr<OpenFile> file = weak.lock()) {
            ours.insert(file->fd);
        }
    }
    const std::unique_ptr<DIR, CloseDirectory> directory(opendir("/proc/self/fd"));
    if (!directory) {
        throw Error("/proc/self/fd cannot be read");
    }
    FilePlace found;
    while (const dirent* entry = readdir(directory.get())) {
        if (entry->d_name[0] == '.' || ours.count(std::atoi(entry->d_name)) != 0) {
            continue;
        }
        const std::string link = std::string("/proc/self/fd/") + entry->d_name;
        struct stat status {};
        if (stat(link.c_str(), &status) != 0 || !S_ISREG(status.st_mode) ||
            (found.file && found.file->identity == Identity(status.st_dev, status.st_ino))) {
            continue;
        }
        Descriptor descriptor(open(link.c_str(), O_RDONLY | O_CLOEXEC));
        if (descriptor.fd < 0) {
            continue;
        }
        const Index& index = index_of(descriptor.fd, link);
        const auto tensor = index.tensors.find(name);
        if (tensor == index.tensors.end() || tensor->second.bytes != bytes) {
            continue;
        }
        char path[4096];
        const ssize_t length = readlink(link.c_str(), path, sizeof path);
        const std::string text(path, length > 0 ? static_cast<size_t>(length) : 0);
        if (found.file) {
            throw Error(std::string(name) + " is in two open files: " + found.file->name +
                        " and " + text);
        }
        found.file = keep(descriptor.release(), text);
        found.offset = tensor->second.offset;
    }
    if (!found.file) {
        throw Error(std::string("no open GGUF file holds ") + name);
    }
    return found;
}

std::vector<Mapping> mappings_of_file_at(const void* address) {
    std::vector<Mapping> found;
    Range wanted;
    if (!find_mapped(address, wanted)) {
        return found;
    }
    std::ifstream maps("/proc/self/maps");
    std::string line;
    Range range;
    while (std::getline(maps, line)) {
        if (parse(line, range) && range.inode == wanted.inode && range.major == wanted.major &&
            range.minor == wanted.minor) {
            found.push_back({range.start, range.end, range.offset});
        }
    }
    return found;
}

} // namespace moetuner
