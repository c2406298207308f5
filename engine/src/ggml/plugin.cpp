// The loader's entry point.
#include "ggml/plugin.h"

#include <cstdio>
#include <cstring>

#include "ggml-impl.h"

namespace moetuner {
namespace {

State*& state_slot() {
    static State* slot = nullptr; // no destructor: see plugin.h
    return slot;
}

// Not through ggml's logger: llama.cpp's writes in a thread of its own, and is lost when the
// program ends at once, as it does when a pattern names a buffer type that is not there.
void refuse(const std::string& why) {
    std::fprintf(stderr, "moetuner: %s\n", why.c_str());
}

} // namespace

State& state() {
    return *state_slot();
}

void make_state() {
    if (state_slot() != nullptr) {
        return;
    }
    auto fresh = std::make_unique<State>();
    fresh->settings = Settings::from_environment();
    fresh->cpu = Cpu::find();
    state_slot() = fresh.release();
}

std::list<std::shared_ptr<Weights>> State::live_models() {
    std::list<std::shared_ptr<Weights>> live;
    const std::lock_guard<std::mutex> guard(mutex);
    models.remove_if([&live](const std::weak_ptr<Weights>& weak) {
        std::shared_ptr<Weights> model = weak.lock();
        const bool gone = !model;
        if (!gone) {
            live.push_back(std::move(model));
        }
        return gone;
    });
    return live;
}

void log_line(LogLevel level, const std::string& text) {
    switch (level) {
    case LogLevel::info:
        GGML_LOG_INFO("moetuner: %s\n", text.c_str());
        break;
    case LogLevel::warning:
        GGML_LOG_WARN("moetuner: %s\n", text.c_str());
        break;
    case LogLevel::error:
        GGML_LOG_ERROR("moetuner: %s\n", text.c_str());
        break;
    }
}

} // namespace moetuner

extern "C" {

// Null (with the reason in the log) when this plugin must not be used: the program then runs
// as without it.
__attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    using namespace moetuner;
    // Structures differ between commits with the same API version.
    if (std::strcmp(ggml_commit(), MOETUNER_GGML_COMMIT) != 0) {
        refuse(std::string("built for ggml ") + MOETUNER_GGML_COMMIT + ", but this program has " +
               ggml_commit() + ": not used (docs/engine.md tells how to build one that fits)");
        return nullptr;
    }
    try {
        make_state();
    } catch (const std::exception& error) {
        refuse(std::string(error.what()) + ": not used");
        return nullptr;
    }
    return registry();
}
}
