#include "ggml/mapping.h"

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <fstream>
#include <sstream>
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

} // namespace

OpenFile::~OpenFile() {
    close(fd);
}

FilePlace place_of_address(const void* address) {
    const auto wanted = reinterpret_cast<uint64_t>(address);
    std::ifstream maps("/proc/self/maps");
    std::string line;
    while (std::getline(maps, line)) {
        Range range;
        if (!parse(line, range) || wanted < range.start || wanted >= range.end) {
            continue;
        }
        if (range.inode == 0) {
            break;
        }
        const std::string path = unescaped(range.path);
        int fd = open_same(path, range);
        if (fd < 0) {
            char link[64];
            std::snprintf(link, sizeof link, "/proc/self/map_files/%" PRIx64 "-%" PRIx64,
                          range.start, range.end);
            fd = open_same(link, range);
        }
        if (fd < 0) {
            throw Error(path + " is mapped but cannot be opened again (replaced or deleted?)");
        }
        return {std::make_shared<OpenFile>(fd, path), range.offset + (wanted - range.start)};
    }
    throw Error("expert weights lie in memory that is no mapping of a file");
}

FilePlace place_of_tensor(const char* name, uint64_t bytes) {
    DIR* directory = opendir("/proc/self/fd");
    if (directory == nullptr) {
        throw Error("/proc/self/fd cannot be read");
    }
    FilePlace found;
    while (const dirent* entry = readdir(directory)) {
        if (entry->d_name[0] == '.') {
            continue;
        }
        const std::string link = std::string("/proc/self/fd/") + entry->d_name;
        struct stat status {};
        if (stat(link.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) {
            continue;
        }
        const int fd = open(link.c_str(), O_RDONLY | O_CLOEXEC);
        char magic[4];
        if (fd < 0 || pread(fd, magic, 4, 0) != 4 || std::memcmp(magic, "GGUF", 4) != 0) {
            if (fd >= 0) {
                close(fd);
            }
            continue;
        }
        gguf_init_params parameters{};
        parameters.no_alloc = true;
        gguf_context* header = gguf_init_from_file(link.c_str(), parameters);
        const int64_t tensor = header != nullptr ? gguf_find_tensor(header, name) : -1;
        if (tensor >= 0 && gguf_get_tensor_size(header, tensor) == bytes) {
            char path[4096];
            const ssize_t length = readlink(link.c_str(), path, sizeof path);
            found.file = std::make_shared<OpenFile>(
                fd, std::string(path, length > 0 ? static_cast<size_t>(length) : 0));
            found.offset = gguf_get_data_offset(header) + gguf_get_tensor_offset(header, tensor);
        } else {
            close(fd);
        }
        gguf_free(header);
        if (found.file) {
            break;
        }
    }
    closedir(directory);
    if (!found.file) {
        throw Error(std::string("no open GGUF file holds ") + name);
    }
    return found;
}

} // namespace moetuner
