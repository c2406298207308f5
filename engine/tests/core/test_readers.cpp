// Which reader one gets, and what the kernel's refusals lead to.
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <doctest/doctest.h>
#include <exception>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <string>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache/cache.h"
#include "support.h"

using namespace support;

namespace {

const std::vector<uint64_t> slices{50000, 61441};

// What a container does: the calling thread's io_uring_setup gives EPERM from now on.
bool forbid_uring() {
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{sizeof filter / sizeof *filter, filter};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// Runs `body` in a child; what it returns is the exit status.
template <typename Body> int in_child(Body&& body) {
    std::fflush(nullptr);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        try {
            _exit(body());
        } catch (const std::exception& error) { // must not unwind into the parent's objects
            std::fprintf(stderr, "%s\n", error.what());
            _exit(99);
        }
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

bool reads_right(Rig& rig, std::unique_ptr<Reader> reader) {
    CacheOptions options;
    options.budget = rig.budget(8);
    const auto cache = rig.cache(std::move(reader), options);
    for (uint32_t unit = 0; unit < rig.model.units.size(); ++unit) {
        const Acquisition got = cache->acquire(&unit, 1);
        for (unsigned s = 0; s < 2; ++s) {
            const void* data = got.wait(0, s);
            if (data == nullptr || !rig.right(unit, s, data)) {
                return false;
            }
        }
    }
    return true;
}

} // namespace

TEST_CASE("automatic: io_uring where it is to be had, with no word about it") {
    Rig rig(make_model(1, 8, slices));
    const auto reader = make_reader({}, rig.files, rig.said.log());
    CHECK((reader->describe().find("io_uring") != std::string::npos) == built_with_uring());
    CHECK(rig.said.count(LogLevel::info) == (built_with_uring() ? 0 : 1));
}

TEST_CASE("io_uring forbidden: threads, with one line that says why; an error if it is a must") {
    Rig rig(make_model(1, 8, slices));
    // A child: the filter stays for good. It has one thread, so that fork is harmless.
    CHECK(in_child([&] {
              if (!forbid_uring()) {
                  return 2;
              }
              auto reader = make_reader({}, rig.files, rig.said.log());
              if (reader->describe().find("pread") == std::string::npos ||
                  rig.said.count(LogLevel::info) != 1 || !rig.said.contains("io_uring")) {
                  return 3;
              }
              ReaderOptions must;
              must.kind = ReaderKind::uring;
              try {
                  make_reader(must, rig.files, rig.said.log());
                  return 4;
              } catch (const Error&) {
              }
              return reads_right(rig, std::move(reader)) ? 0 : 5;
          }) == 0);
}

TEST_CASE("buffers that may not be registered: goes on without, and says so") {
    if (!built_with_uring()) {
        MESSAGE("this build has no io_uring");
        return;
    }
    Rig rig(make_model(1, 8, slices));
    CHECK(in_child([&] {
              const rlimit little{256 << 10, 256 << 10}; // the rings, not the arena
              if (setrlimit(RLIMIT_MEMLOCK, &little) != 0 ||
                  (geteuid() == 0 && setuid(65534) != 0)) {
                  return 2;
              }
              ReaderOptions options;
              options.kind = ReaderKind::uring;
              options.register_buffers = true;
              const bool right = reads_right(rig, make_reader(options, rig.files, rig.said.log()));
              return !right ? 3 : rig.said.contains("not registered") ? 0 : 4;
          }) == 0);
}

TEST_CASE("a reader that never started, or never read, goes quietly") {
    Rig rig(make_model(1, 8, slices));
    for (const ReaderCase& way : readers()) {
        CAPTURE(way.name);
        { const auto reader = way.make(rig.files, rig.said.log()); }
        CacheOptions options;
        options.budget = rig.budget(4);
        const auto cache = rig.cache(way.make(rig.files, rig.said.log()), options);
        CHECK(!cache->describe_reader().empty());
    }
}

TEST_CASE("a pool grows and shrinks between reads") {
    Rig rig(make_model(1, 8, slices));
    auto reader = pool(rig.files, 1);
    Reader& threads = *reader;
    threads.set_depth(3); // before it starts
    CHECK(threads.depth() == 3);
    CacheOptions options;
    options.budget = rig.budget(8);
    const auto cache = rig.cache(std::move(reader), options);
    for (const unsigned depth : {1U, 6U, 2U, 64U, 1U}) {
        cache->set_depth(depth);
        CHECK(cache->describe_reader() == "pread, " + std::to_string(depth) + " threads");
        const uint32_t unit = depth % 8;
        const Acquisition got = cache->acquire(&unit, 1);
        CHECK(rig.right(unit, 1, got.wait(0, 1)));
    }
    threads.set_depth(1000);
    CHECK(threads.depth() == threads.max_depth());
}
