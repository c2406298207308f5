// Files whose every byte is known, caches over them, a reader that the test itself drives.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "cache/cache.h"
#include "io/fault_reader.h"
#include "io/files.h"
#include "io/reader.h"

namespace support {

using namespace moetuner;

// The byte at `offset` of a file made with `seed`.
std::byte byte_at(uint64_t seed, uint64_t offset);

// A directory that goes with its owner. Below $TMPDIR, else /tmp.
class Directory {
  public:
    explicit Directory(const std::string& below = {});
    ~Directory();
    Directory(const Directory&) = delete;
    Directory& operator=(const Directory&) = delete;
    std::string path(const std::string& name) const { return path_ + "/" + name; }

  private:
    std::string path_;
};

// Writes `bytes` bytes of byte_at(seed, …), and to the disk.
void write_pattern(const std::string& path, uint64_t seed, uint64_t bytes);

// How many of the `bytes` bytes at `data` differ from the file's from `offset` on.
uint64_t wrong_bytes(const void* data, uint64_t seed, uint64_t offset, uint64_t bytes);

// What the engine said.
class Said {
  public:
    Log log();
    size_t count(LogLevel level) const;
    bool contains(const std::string& part) const;
    std::string all() const;

  private:
    struct Line {
        LogLevel level;
        std::string text;
    };
    mutable std::mutex mutex_;
    std::vector<Line> lines_;
};

// `layers` × `experts` units of slices with the given sizes, tensor after tensor as in a
// GGUF file: all gates of a layer, then all ups, then all downs. Tensors begin 32 bytes
// aligned, hardly ever at a block. Unit number: layer × experts + expert.
struct Model {
    std::vector<UnitSpec> units;
    uint64_t file_bytes = 0;
};
Model make_model(uint32_t layers, uint32_t experts, const std::vector<uint64_t>& slice_bytes,
                 uint32_t file = 0);

// A model in a file of its own, opened.
struct Rig {
    explicit Rig(Model given, bool allow_direct = true, const std::string& below = {});
    Said said;
    Directory directory;
    Model model;
    Files files;

    // Budget for so many of the largest unit.
    uint64_t budget(uint64_t slots) const;
    std::unique_ptr<Cache> cache(std::unique_ptr<Reader> reader, CacheOptions options);
    // Whether the bytes of a slice are the file's.
    bool right(uint32_t unit, unsigned slice, const void* data) const;
};
constexpr uint64_t rig_seed = 7;

// Every way to read that this build has. `kind` in the names of subcases.
struct ReaderCase {
    const char* name;
    std::function<std::unique_ptr<Reader>(Files&, const Log&)> make;
};
std::vector<ReaderCase> readers();
std::unique_ptr<Reader> pool(Files& files, unsigned threads = 4);

// Reads nothing until the test says so, and then only what it names.
class ManualReader final : public Reader {
  public:
    explicit ManualReader(unsigned depth = 256, uint64_t seed = rig_seed)
        : depth_(depth), seed_(seed) {}
    ~ManualReader() override { stop(); }

    void start(Source& source, const std::vector<Memory>&) override { source_ = &source; }
    void kick() noexcept override; // takes up to the depth
    void stop() noexcept override; // completes everything
    void set_depth(unsigned depth) noexcept override { depth_ = depth; }
    unsigned depth() const noexcept override { return depth_; }
    unsigned max_depth() const noexcept override { return 256; }
    std::string describe() const override { return "manual"; }

    std::vector<Attempt> taken() const; // under way, in the order taken
    // Completes the attempt number `index` of taken(): with the file's bytes, or so.
    void complete(size_t index);
    void complete(size_t index, int64_t result);
    void complete_all(); // with all that is taken meanwhile

  private:
    Attempt remove(size_t index);
    mutable std::mutex mutex_;
    Source* source_ = nullptr;
    unsigned depth_;
    uint64_t seed_;
    std::vector<Attempt> under_way_;
};

} // namespace support
