#include <doctest/doctest.h>

#include <cerrno>
#include <chrono>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>

#include "page_reader.h"
#include "support.h"

using namespace support;

namespace {

// Every word is `value`.
PageFigures all(uint64_t value) {
    std::vector<uint64_t> words(figure_words, value);
    PageFigures figures;
    std::memcpy(&figures, words.data(), sizeof figures);
    return figures;
}

std::vector<PageLayer> all(uint64_t value, uint32_t layers) {
    return std::vector<PageLayer>(
        layers, {value, value, value, value, value, value, value, value});
}

bool of_one_publication(const Snapshot& snapshot) {
    const uint64_t value = snapshot.figures.state;
    const PageFigures figures = all(value);
    bool same = std::memcmp(&figures, &snapshot.figures, sizeof figures) == 0;
    for (const PageLayer& layer : snapshot.layers) {
        const PageLayer wanted = all(value, 1).front();
        same = same && std::memcmp(&layer, &wanted, sizeof layer) == 0;
    }
    return same && snapshot.sequence == 2 * value;
}

} // namespace

TEST_CASE("a page says what it is, and keeps its size") {
    const Page page("/models/some.gguf", "abc1234", 3);
    std::vector<std::byte> bytes(8192);
    const ssize_t size = pread(page.descriptor(), bytes.data(), bytes.size(), 0);
    REQUIRE(size == 4096 + 3 * 64);
    const auto number = [&bytes](size_t at) {
        uint32_t value;
        std::memcpy(&value, &bytes[at], 4);
        return value;
    };
    CHECK(std::memcmp(bytes.data(), "moetuner", 8) == 0);
    CHECK(number(8) == 1);
    CHECK(number(12) == size);
    CHECK(number(16) == 64); // identity
    CHECK(number(24) == 1024); // control
    CHECK(number(28) == 1024);
    CHECK(number(32) == 2048); // figures
    CHECK(number(36) == 2048);
    CHECK(number(40) == 4096); // layers
    CHECK(number(44) == 3 * 64);
    CHECK(number(48) == 64);
    CHECK(number(52) == 3);
    CHECK(number(64) == static_cast<uint32_t>(getpid()));
    CHECK(std::string(reinterpret_cast<char*>(&bytes[80])) == "abc1234");
    CHECK(std::string(reinterpret_cast<char*>(&bytes[128])) == "/models/some.gguf");
    for (const off_t other : {off_t{0}, off_t{4096}, off_t{1} << 20}) {
        CHECK(ftruncate(page.descriptor(), other) == -1);
        CHECK(errno == EPERM);
    }
    struct stat status {};
    REQUIRE(fstat(page.descriptor(), &status) == 0);
    CHECK((status.st_mode & 07777) == 0600);
    CHECK((fcntl(page.descriptor(), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST_CASE("of a name that is too long the end is kept") {
    const std::string name = "/" + std::string(2000, 'x') + "/model.gguf";
    const Page page(name, std::string(100, 'c'), 1);
    const auto* identity =
        reinterpret_cast<const PageIdentity*>(page.memory() + identity_offset);
    const std::string kept(identity->model, sizeof identity->model);
    CHECK(kept == name.substr(name.size() - kept.size()));
    CHECK(std::string(identity->commit, sizeof identity->commit) == std::string(48, 'c'));
}

TEST_CASE("what is published is read") {
    Page page("m", "c", 2);
    CHECK(of_one_publication(read_settled(page)));
    for (uint64_t value = 1; value < 4; ++value) {
        page.publish(all(value), all(value, 2));
        const Snapshot snapshot = read_settled(page);
        CHECK(of_one_publication(snapshot));
        CHECK(snapshot.figures.experts == value);
    }
}

TEST_CASE("rows beyond those of the page are left out, missing ones stay") {
    Page page("m", "c", 2);
    page.publish(all(1), all(1, 5));
    CHECK(of_one_publication(read_settled(page)));
    page.publish(all(2), {});
    const Snapshot snapshot = read_settled(page);
    CHECK(snapshot.figures.state == 2);
    CHECK(snapshot.layers[1].hits == 1);
}

TEST_CASE("a reader never sees two publications mixed") {
    Page page("m", "c", 40);
    constexpr uint64_t publications = 4000;
    std::atomic<bool> over{false};
    std::atomic<uint64_t> mixed{0};
    std::atomic<uint64_t> reads{0};
    const auto read = [&] {
        Snapshot snapshot;
        uint64_t last = 0;
        while (!over.load(std::memory_order_relaxed)) {
            if (read_page(page, snapshot)) {
                reads.fetch_add(1, std::memory_order_relaxed);
                const bool good = of_one_publication(snapshot) && snapshot.figures.state >= last;
                mixed.fetch_add(good ? 0 : 1, std::memory_order_relaxed);
                last = snapshot.figures.state;
            }
        }
    };
    // The other process's way: three system calls.
    const auto read_calls = [&] {
        std::vector<uint64_t> words(256);
        std::vector<PageLayer> layers(40);
        uint64_t before = 0;
        uint64_t after = 0;
        const int fd = page.descriptor();
        while (!over.load(std::memory_order_relaxed)) {
            bool good = pread(fd, &before, 8, figures_offset) == 8;
            good = good && pread(fd, words.data(), 2048, figures_offset) == 2048;
            good = good && pread(fd, layers.data(), 40 * 64, layers_offset) == 40 * 64;
            good = good && pread(fd, &after, 8, figures_offset) == 8;
            mixed.fetch_add(good ? 0 : 1, std::memory_order_relaxed);
            if (good && before % 2 == 0 && before == after) {
                Snapshot snapshot;
                snapshot.sequence = before;
                std::memcpy(&snapshot.figures, &words[1], sizeof snapshot.figures);
                snapshot.layers = layers;
                reads.fetch_add(1, std::memory_order_relaxed);
                mixed.fetch_add(of_one_publication(snapshot) ? 0 : 1, std::memory_order_relaxed);
            }
        }
    };
    std::vector<std::thread> readers;
    readers.emplace_back(read);
    readers.emplace_back(read);
    readers.emplace_back(read_calls);
    for (uint64_t value = 1; value <= publications; ++value) {
        page.publish(all(value), all(value, 40));
        if (value % 16 == 0) {
            std::this_thread::yield(); // or readers on few cores never meet a settled page
        }
    }
    while (reads.load(std::memory_order_relaxed) < 10) {
        std::this_thread::yield();
    }
    over.store(true, std::memory_order_relaxed);
    for (std::thread& reader : readers) {
        reader.join();
    }
    CHECK(mixed == 0);
    CHECK(of_one_publication(read_settled(page)));
}

TEST_CASE("wishes are seen when they are written whole") {
    Page page("m", "c", 1);
    const auto none = page.wishes();
    REQUIRE(none);
    CHECK(none->generation == 0);
    CHECK(none->depth == 0);
    CHECK(none->trace_file.empty());
    Wishes wishes;
    wishes.depth = 5;
    wishes.threads = 3;
    wishes.trace_request = 9;
    wishes.trace_on = true;
    wishes.trace_file = "/tmp/trace";
    wish(page, wishes, true);
    CHECK(page.generation() == 1);
    CHECK(!page.wishes());
    wish(page, wishes); // whoever comes after one that died
    const auto seen = page.wishes();
    REQUIRE(seen);
    CHECK(seen->generation == 2);
    CHECK(seen->depth == 5);
    CHECK(seen->threads == 3);
    CHECK(seen->trace_request == 9);
    CHECK(seen->trace_on);
    CHECK(seen->trace_file == "/tmp/trace");
}

TEST_CASE("wishes are never mixed") {
    Page page("m", "c", 1);
    std::atomic<bool> over{false};
    std::thread controller([&] {
        Wishes wishes;
        for (uint32_t i = 1; !over.load(std::memory_order_relaxed); ++i) {
            wishes.depth = wishes.threads = wishes.trace_request = i;
            wishes.trace_file = std::string(900, static_cast<char>('a' + i % 26));
            wish(page, wishes);
            if (i % 8 == 0) {
                // Or a slow reader (a sanitizer's, an emulator's) hardly ever gets a whole one.
                std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
        }
    });
    uint64_t mixed = 0;
    for (uint64_t good = 0; good < 30000;) {
        const auto wishes = page.wishes();
        if (wishes && wishes->depth != 0) {
            ++good;
            const std::string whole(900, static_cast<char>('a' + wishes->depth % 26));
            mixed += wishes->threads != wishes->depth || wishes->trace_request != wishes->depth ||
                     wishes->trace_file != whole || wishes->generation != 2 * wishes->depth;
        }
    }
    over.store(true, std::memory_order_relaxed);
    controller.join();
    CHECK(mixed == 0);
}

TEST_CASE("a file name without an end stops where the field does") {
    Page page("m", "c", 1);
    Wishes wishes;
    wishes.trace_file = std::string(3000, 'x');
    wish(page, wishes);
    CHECK(page.wishes()->trace_file == std::string(page_text, 'x'));
    // Nothing beyond the field was written.
    CHECK(read_settled(page).sequence == 0);
}

TEST_CASE("the page outlives its maker for whoever has it open") {
    int kept;
    {
        Page page("m", "c", 1);
        page.publish(all(7), all(7, 1));
        kept = dup(page.descriptor());
    }
    uint64_t state = 0;
    CHECK(pread(kept, &state, 8, figures_offset + 8) == 8);
    CHECK(state == 7);
    close(kept);
}
