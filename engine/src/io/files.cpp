#include "io/files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace moetuner {
namespace {

constexpr uint64_t smallest_block = 4096;

// struct statx as the kernel lays it out: headers older than Linux 6.1 (Ubuntu 22.04) lack
// the two fields, though the kernel that runs may have them.
struct Statx {
    uint32_t mask;
    unsigned char before[148];
    uint32_t dio_mem_align;
    uint32_t dio_offset_align;
    unsigned char after[96];
};
static_assert(sizeof(Statx) == 256 && offsetof(Statx, dio_mem_align) == 152);
constexpr unsigned statx_dioalign = 0x2000;

struct DirectSupport {
    bool refused = false; // the kernel says that there is none
    uint64_t block = smallest_block;
};

DirectSupport direct_support(int fd) {
    DirectSupport found;
    Statx info{};
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, statx_dioalign, &info) != 0 ||
        (info.mask & statx_dioalign) == 0) {
        return found;
    }
    if (info.dio_offset_align == 0) {
        found.refused = true;
        return found;
    }
    found.block = std::max<uint64_t>({smallest_block, info.dio_mem_align, info.dio_offset_align});
    return found;
}

} // namespace

Files::Files(Log log, bool allow_direct)
    : log_(std::move(log)), allow_direct_(allow_direct), block_(smallest_block) {}

Files::~Files() {
    for (const File& file : files_) {
        if (file.direct_fd >= 0) {
            close(file.direct_fd);
        }
        close(file.buffered_fd);
    }
}

uint32_t Files::add(const std::string& path, const std::string& name) {
    const std::string shown = name.empty() ? path : name;
    const int buffered = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (buffered < 0) {
        throw Error("cannot open " + shown + ": " + std::strerror(errno));
    }
    struct stat status {};
    if (fstat(buffered, &status) != 0 || !(S_ISREG(status.st_mode) || S_ISBLK(status.st_mode))) {
        close(buffered);
        throw Error(shown + " is not a file that can be read at an offset");
    }
    const off_t end = lseek(buffered, 0, SEEK_END); // block devices have no st_size
    // Read-ahead would bring in neighbours that nobody asked for.
    posix_fadvise(buffered, 0, 0, POSIX_FADV_RANDOM);

    files_.emplace_back();
    File& file = files_.back();
    const uint32_t number = count() - 1;
    file.name = shown;
    file.size = end > 0 ? static_cast<uint64_t>(end) : 0;
    file.buffered_fd = buffered;
    if (!allow_direct_) {
        return number;
    }
    file.direct.store(true, std::memory_order_relaxed);
    file.direct_fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (file.direct_fd < 0) {
        turn_buffered(number, std::strerror(errno));
        return number;
    }
    const DirectSupport support = direct_support(file.direct_fd);
    if (support.refused) {
        turn_buffered(number, "the file system has no direct reads for it");
    } else {
        block_ = std::max(block_, support.block);
    }
    return number;
}

void Files::turn_buffered(uint32_t file, const std::string& why) noexcept {
    if (!files_[file].direct.exchange(false, std::memory_order_relaxed) || !log_) {
        return;
    }
    log_(LogLevel::warning, "direct reads of " + files_[file].name + " are refused (" + why +
                                "): it is read through the page cache, which is slower");
}

void Files::forget(uint32_t file, uint64_t offset, uint64_t bytes) const noexcept {
    posix_fadvise(files_[file].buffered_fd, static_cast<off_t>(offset), static_cast<off_t>(bytes),
                  POSIX_FADV_DONTNEED);
}

} // namespace moetuner
