// Threads of the readers.
#pragma once

#include <csignal>
#include <cstring>
#include <pthread.h>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "io/log.h"

namespace moetuner {

// A thread that takes no signal: those are for the program that the engine is loaded into.
// Throws Error when the system gives none.
template <typename Body> std::thread start_thread(const char* name, Body&& body) {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // inherited by the new thread
    try {
        std::thread thread(std::forward<Body>(body));
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        pthread_setname_np(thread.native_handle(), name); // at most 15 characters
        return thread;
    } catch (const std::system_error& error) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw Error(std::string("cannot start a reading thread: ") + error.what());
    }
}

} // namespace moetuner
