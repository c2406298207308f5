// Devices and files that do not do as they should. A slice is there or it has failed;
// nobody computes with anything else.
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <doctest/doctest.h>
#include <filesystem>
#include <numeric>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "cache/arena.h"
#include "cache/cache.h"
#include "support.h"

using namespace support;

namespace {

CacheOptions options_of(uint64_t budget) {
    CacheOptions options;
    options.budget = budget;
    options.piece = 16384;
    return options;
}

struct Outcome {
    size_t right = 0;
    size_t failed = 0; // wait() said so
    size_t wrong = 0;
    std::string error; // the last
};

// Waits for every slice of the acquisition.
void look_at(const Rig& rig, const Acquisition& got, Outcome& outcome) {
    for (size_t i = 0; i < got.size(); ++i) {
        for (unsigned s = 0; s < rig.model.units[got.unit(i)].slices.size(); ++s) {
            const void* data = got.wait(i, s);
            if (data != nullptr) {
                ++(rig.right(got.unit(i), s, data) ? outcome.right : outcome.wrong);
                continue;
            }
            ++outcome.failed;
            outcome.error = got.error(i, s);
            REQUIRE(!outcome.error.empty());
            REQUIRE(!got.ready(i, s));
            REQUIRE(got.wait_arrived(i, s, ~0ULL) == 0);
        }
    }
}

// Reads every unit of the model, four at a time, or fewer: after a failure some slots may
// not have come to rest when the next ones are acquired.
Outcome read_all(const Rig& rig, Cache& cache) {
    Outcome outcome;
    const auto count = static_cast<uint32_t>(rig.model.units.size());
    std::vector<uint32_t> units(count);
    std::iota(units.begin(), units.end(), 0U);
    for (uint32_t next = 0; next < count;) {
        const Acquisition got = cache.acquire(&units[next], std::min(4U, count - next));
        look_at(rig, got, outcome);
        next += static_cast<uint32_t>(got.size());
    }
    return outcome;
}

const std::vector<uint64_t> slices{50000, 50000, 61441};

} // namespace

TEST_CASE("short reads, interruptions, delays and disorder change nothing") {
    for (const ReaderCase& way : readers()) {
        CAPTURE(way.name);
        for (uint64_t seed = 1; seed <= 3; ++seed) {
            Rig rig(make_model(2, 8, slices));
            Faults faults;
            faults.seed = seed;
            faults.short_read = 400;
            faults.eintr = 100;
            faults.eagain = 100;
            faults.delay = 100;
            faults.reorder = 200;
            const auto cache =
                rig.cache(make_fault_reader(way.make(rig.files, rig.said.log()), faults),
                          options_of(rig.budget(5)));
            const Outcome outcome = read_all(rig, *cache);
            CHECK(outcome.right == 48);
            CHECK(outcome.failed == 0);
            CHECK(outcome.wrong == 0);
            CHECK(cache->stats().retries > 0);
            CHECK(rig.said.count(LogLevel::error) == 0);
        }
    }
}

TEST_CASE("EINVAL of a direct read: the file is read through the page cache, with one warning") {
    for (const ReaderCase& way : readers()) {
        CAPTURE(way.name);
        Rig rig(make_model(2, 8, slices));
        if (!rig.files.direct(0)) {
            continue; // its file system refuses anyway: other cases are about that
        }
        Faults faults;
        faults.einval = 1000;
        const auto cache = rig.cache(make_fault_reader(way.make(rig.files, rig.said.log()), faults),
                                     options_of(rig.budget(5)));
        const Outcome outcome = read_all(rig, *cache);
        CHECK(outcome.right == 48);
        CHECK(!rig.files.direct(0));
        CHECK(rig.said.count(LogLevel::warning) == 1);
        CHECK(rig.said.contains("model.gguf"));
        CHECK(rig.said.contains("Invalid argument"));
        CHECK(cache->stats().buffered >= cache->stats().reads);
    }
}

TEST_CASE("a single EIO is forgiven") {
    Rig rig(make_model(2, 8, slices));
    Faults faults;
    faults.eio = 30;
    faults.seed = 5;
    const auto cache =
        rig.cache(make_fault_reader(pool(rig.files, 1), faults), options_of(rig.budget(5)));
    const Outcome outcome = read_all(rig, *cache);
    CHECK(outcome.right == 48);
    CHECK(cache->stats().retries > 0);
    CHECK(cache->stats().failures == 0);
}

TEST_CASE("EIO for good: that slice fails with file, offset and errno, all others are right") {
    for (const ReaderCase& way : readers()) {
        CAPTURE(way.name);
        Rig rig(make_model(2, 8, slices));
        const Extent bad = rig.model.units[5].slices[1];
        Faults faults;
        faults.hard_eio_file = 0;
        faults.hard_from = bad.offset + 20000;
        faults.hard_to = bad.offset + 20001;
        const auto cache = rig.cache(make_fault_reader(way.make(rig.files, rig.said.log()), faults),
                                     options_of(rig.budget(16)));
        for (int pass = 0; pass < 2; ++pass) {
            const Outcome outcome = read_all(rig, *cache);
            CHECK(outcome.failed == 1);
            CHECK(outcome.right == 47);
            CHECK(outcome.wrong == 0);
            CHECK(outcome.error.find("model.gguf at offset ") != std::string::npos);
            CHECK(outcome.error.find("errno 5") != std::string::npos);
            // It is tried anew when the unit is acquired again.
            cache->drain();
            CHECK(cache->stats().failures == static_cast<uint64_t>(pass + 1));
        }
        CHECK(rig.said.count(LogLevel::error) == 2);
    }
}

TEST_CASE("a slice that failed is read anew when its unit is acquired again") {
    Rig rig(make_model(1, 4, slices));
    auto owned = std::make_unique<ManualReader>();
    ManualReader& reader = *owned;
    const auto cache = rig.cache(std::move(owned), options_of(rig.budget(4)));
    const uint32_t unit = 2;
    Acquisition got = cache->acquire(&unit, 1);
    reader.complete(1, -EIO);
    CHECK(!reader.taken().back().direct); // its second chance
    reader.complete(reader.taken().size() - 1, -EIO);
    CHECK(got.wait(0, 0) == nullptr); // at once, though other pieces are under way
    const std::string error = got.error(0, 0);
    CHECK(error.find("Input/output error") != std::string::npos);
    reader.complete_all();
    CHECK(got.wait(0, 0) == nullptr);
    CHECK(rig.right(unit, 1, got.wait(0, 1)));

    Acquisition beside = cache->acquire(&unit, 1); // not while another has it pinned
    CHECK(beside.wait(0, 0) == nullptr);
    CHECK(beside.error(0, 0) == error);
    cache->release(beside);
    cache->prefetch(&unit, 1);
    CHECK(reader.taken().empty());
    CHECK(got.error(0, 0) == error);
    cache->release(got);

    got = cache->acquire(&unit, 1);
    CHECK(!reader.taken().empty());
    reader.complete_all();
    for (unsigned s = 0; s < 3; ++s) {
        CHECK(rig.right(unit, s, got.wait(0, s)));
        CHECK(got.error(0, s).empty());
    }
}

TEST_CASE("an error is of the unit, not of the slot that it was in") {
    Rig rig(make_model(1, 4, slices));
    auto owned = std::make_unique<ManualReader>(1);
    ManualReader& reader = *owned;
    const auto cache = rig.cache(std::move(owned), options_of(rig.budget(1)));
    std::vector<std::string> errors;
    for (const uint32_t unit : {1U, 2U}) {
        Acquisition got = cache->acquire(&unit, 1);
        reader.complete(0, -EIO);
        reader.complete(0, -ENXIO);
        errors.push_back(got.error(0, 0));
        CHECK(got.error(0, 1).empty());
        reader.complete_all();
    }
    CHECK(errors[0].find("No such device") != std::string::npos);
    CHECK(errors[0] != errors[1]); // the offset
}

TEST_CASE("everybody who waits for a slice learns of its failure") {
    Rig rig(make_model(1, 4, slices));
    auto owned = std::make_unique<ManualReader>();
    ManualReader& reader = *owned;
    const auto cache = rig.cache(std::move(owned), options_of(rig.budget(4)));
    const uint32_t unit = 2;
    Acquisition got = cache->acquire(&unit, 1);
    std::atomic<int> failed{0};
    std::vector<std::thread> waiting;
    for (int t = 0; t < 3; ++t) {
        waiting.emplace_back([&, t] {
            const bool good =
                t == 0 ? got.wait_arrived(0, 0, 50000) != 0 : got.wait(0, 0) != nullptr;
            failed += good ? 0 : 1;
        });
    }
    while (!reader.taken().empty()) {
        reader.complete(0, -EIO);
        std::this_thread::yield(); // some wait before the failure, some come after it
    }
    for (std::thread& thread : waiting) {
        thread.join();
    }
    CHECK(failed == 3);
    CHECK(!got.error(0, 0).empty());
}

TEST_CASE("a file cut short under us: what is gone fails, what is left is right") {
    for (const ReaderCase& way : readers()) {
        CAPTURE(way.name);
        Rig rig(make_model(2, 8, slices));
        const auto cache =
            rig.cache(way.make(rig.files, rig.said.log()), options_of(rig.budget(4)));
        const uint64_t cut = rig.model.units[12].slices[1].offset + 777;
        std::filesystem::resize_file(rig.directory.path("model.gguf"), cut);
        size_t lost = 0;
        for (const UnitSpec& unit : rig.model.units) {
            for (const Extent& slice : unit.slices) {
                lost += slice.offset + slice.bytes > cut ? 1 : 0;
            }
        }
        const Outcome outcome = read_all(rig, *cache);
        CHECK(outcome.failed == lost);
        CHECK(outcome.right == 48 - lost);
        CHECK(outcome.wrong == 0);
        CHECK(outcome.error.find("the file ends there") != std::string::npos);
    }
}

TEST_CASE("a slice that ends with the file, inside a block") {
    for (const ReaderCase& way : readers()) {
        CAPTURE(way.name);
        for (const uint64_t after : {0U, 1U, 95U}) {
            Model model = make_model(1, 3, {50001});
            model.file_bytes = model.units[2].slices[0].offset + 50001 + after;
            Rig rig(model);
            const auto cache =
                rig.cache(way.make(rig.files, rig.said.log()), options_of(rig.budget(3)));
            CHECK(read_all(rig, *cache).right == 3);
        }
    }
}

TEST_CASE("a file system in memory, which takes or refuses O_DIRECT as its kernel likes") {
    for (const ReaderCase& way : readers()) {
        CAPTURE(way.name);
        Rig rig(make_model(2, 4, slices), true, "/dev/shm");
        const auto cache =
            rig.cache(way.make(rig.files, rig.said.log()), options_of(rig.budget(4)));
        CHECK(read_all(rig, *cache).right == 24);
        CHECK(rig.said.count(LogLevel::warning) == (rig.files.direct(0) ? 0 : 1));
    }
}

TEST_CASE("destroyed with reads under way and queued") {
    for (const ReaderCase& way : readers()) {
        CAPTURE(way.name);
        for (const bool faulty : {false, true}) {
            Rig rig(make_model(2, 8, slices));
            Faults faults;
            faults.delay = 500;
            faults.max_delay_us = 3000;
            faults.short_read = 200;
            faults.eio = 100;
            for (int round = 0; round < 10; ++round) {
                auto reader = way.make(rig.files, rig.said.log());
                if (faulty) {
                    reader = make_fault_reader(std::move(reader), faults);
                }
                const auto cache = rig.cache(std::move(reader), options_of(rig.budget(16)));
                std::vector<uint32_t> units(16);
                std::iota(units.begin(), units.end(), 0U);
                Acquisition got = cache->acquire(units.data(), units.size());
                if (round % 2 == 0) {
                    got.wait(0, 0);
                }
            }
            CHECK(rig.said.all().find("Operation canceled") == std::string::npos);
        }
    }
}

TEST_CASE("memory that is refused is an error that says how much") {
    const uint64_t absurd = 1ULL << 60;
    CHECK_THROWS_WITH_AS(Arena(absurd, 4096, false, false),
                         doctest::Contains(std::to_string(absurd).c_str()), Error);
}

TEST_CASE("an arena for huge pages begins at one") {
    const Arena arena(3 << 20, 4096, true, false);
    CHECK(reinterpret_cast<uintptr_t>(arena.base()) % (2 << 20) == 0);
    CHECK(arena.bytes() == 3 << 20);
    CHECK(arena.locked_bytes() == 0);
    CHECK(arena.lock_errno() == 0);
    arena.base()[(3 << 20) - 1] = std::byte{1};
}

TEST_CASE("an arena is locked as far as the limit lets it, and says so") {
    std::fflush(nullptr);
    const pid_t child = fork(); // the limit is for ordinary users, and is not given back
    REQUIRE(child >= 0);
    if (child == 0) {
        constexpr rlim_t limit = 3 << 20;
        const rlimit small{limit, limit};
        if (setrlimit(RLIMIT_MEMLOCK, &small) != 0 || (geteuid() == 0 && setuid(65534) != 0)) {
            _exit(2);
        }
        const Arena arena(8 << 20, 4096, false, true);
        const bool told = arena.lock_errno() == ENOMEM && arena.locked_bytes() > 0 &&
                          arena.locked_bytes() <= limit;
        _exit(told ? 0 : 1);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
}
