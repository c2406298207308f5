#include "page/page.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <new>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/log.h"

namespace moetuner {
namespace {

[[noreturn]] void refuse(const char* what) {
    throw Error(std::string(what) + ": " + std::strerror(errno));
}

uint64_t realtime_ns() {
    timespec time{};
    clock_gettime(CLOCK_REALTIME, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1000000000 + static_cast<uint64_t>(time.tv_nsec);
}

void store_words(std::atomic<uint64_t>* target, const void* source, size_t words) noexcept {
    for (size_t i = 0; i < words; ++i) {
        uint64_t word;
        std::memcpy(&word, static_cast<const std::byte*>(source) + 8 * i, 8);
        target[i].store(word, std::memory_order_release);
    }
}

} // namespace

void put_text(char* target, size_t size, const std::string& text) noexcept {
    const size_t length = std::min(size, text.size());
    std::memset(target, 0, size);
    std::memcpy(target, text.data() + (text.size() - length), length);
}

Page::Page(const std::string& model, const std::string& commit, uint32_t layers)
    : fd_(memfd_create(page_name, MFD_CLOEXEC | MFD_ALLOW_SEALING)),
      bytes_(layers_offset + layers * sizeof(PageLayer)), layer_count_(layers) {
    if (fd_ < 0) {
        refuse("memfd_create");
    }
    rlimit most{};
    if (getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur < bytes_) {
        close(fd_);
        errno = EFBIG; // to try would be a signal that ends the program
        refuse("the limit on file size (RLIMIT_FSIZE)");
    }
    void* mapped = MAP_FAILED;
    // Sealed in size: neither side can make the other's accesses fault. The mode is 0777
    // otherwise; that /proc/PID/fd is closed to others does not depend on it.
    if (fchmod(fd_, 0600) == 0 && ftruncate(fd_, static_cast<off_t>(bytes_)) == 0 &&
        fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0) {
        mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    }
    if (mapped == MAP_FAILED) {
        const int error = errno;
        close(fd_);
        errno = error;
        refuse("the memory of a memfd");
    }
    base_ = static_cast<std::byte*>(mapped); // all zeros
    auto* header = new (at(0)) PageHeader{};
    header->version = page_version;
    header->bytes = static_cast<uint32_t>(bytes_);
    header->identity = {identity_offset, sizeof(PageIdentity)};
    header->control = {control_offset, sizeof(PageControl)};
    header->figures = {figures_offset, sizeof(PageSequenced)};
    header->layers = {layers_offset, static_cast<uint32_t>(layers * sizeof(PageLayer))};
    header->layer_bytes = sizeof(PageLayer);
    header->layer_count = layers;
    auto* identity = new (at(identity_offset)) PageIdentity{};
    identity->pid = static_cast<uint32_t>(getpid());
    identity->made_ns = realtime_ns();
    put_text(identity->commit, sizeof identity->commit, commit);
    put_text(identity->model, sizeof identity->model, model);
    control_ = new (at(control_offset)) PageControl{};
    sequenced_ = new (at(figures_offset)) PageSequenced{};
    layers_ = reinterpret_cast<std::atomic<uint64_t>*>(at(layers_offset));
    for (size_t i = 0; i < layers * layer_words; ++i) {
        new (&layers_[i]) std::atomic<uint64_t>{0};
    }
    header->magic.store(page_magic, std::memory_order_release);
}

Page::~Page() {
    munmap(base_, bytes_);
    close(fd_);
}

void Page::publish(const PageFigures& figures, const std::vector<PageLayer>& layers) noexcept {
    const uint64_t sequence = sequenced_->sequence.load(std::memory_order_relaxed);
    sequenced_->sequence.store(sequence + 1, std::memory_order_relaxed);
    store_words(sequenced_->words, &figures, figure_words);
    store_words(layers_, layers.data(),
                std::min<size_t>(layers.size(), layer_count_) * layer_words);
    sequenced_->sequence.store(sequence + 2, std::memory_order_release);
}

uint32_t Page::generation() const noexcept {
    return control_->generation.load(std::memory_order_acquire);
}

std::optional<Wishes> Page::wishes() const {
    constexpr auto order = std::memory_order_acquire; // what follows stays behind each load
    Wishes wishes;
    wishes.generation = generation();
    wishes.depth = control_->depth.load(order);
    wishes.threads = control_->threads.load(order);
    wishes.trace_request = control_->trace_request.load(order);
    wishes.trace_on = control_->trace_on.load(order) == 1;
    char text[page_text];
    for (size_t i = 0; i < page_text / 8; ++i) {
        const uint64_t word = control_->trace_file[i].load(order);
        std::memcpy(text + 8 * i, &word, 8);
    }
    wishes.trace_file.assign(text, strnlen(text, sizeof text));
    if (wishes.generation % 2 != 0 || generation() != wishes.generation) {
        return std::nullopt;
    }
    return wishes;
}

} // namespace moetuner
