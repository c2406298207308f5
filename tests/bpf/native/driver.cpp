/* A process under observation. It obeys lines on standard input and answers each with one
 * line; `inside FN` obeys the lines that follow within a call, until one leaves it.
 *
 *   load PATH          dlopen the library (unless built with LINKED)
 *   call FN N          N calls; answers the sum of the results for x = 0 … N-1
 *   threads T FN N     T threads of N calls each
 *   nest FN FN N       N calls of the first, each of which calls the second
 *   recurse FN DEPTH   a call within a call within …
 *   inside FN          `deep` before FN puts 64 KiB of stack between
 *     return | throw | longjmp | fork
 *   thread             obeys further lines in another thread, until it ends
 *     pthread_exit | cancel | end
 *   hold N FN          N threads stay inside a call until the process ends
 *   children N FN      N child processes call once and end
 *   forever T FN       T threads call without end, and check each result
 *   map N PATH         N executable mappings of a file, one after the other
 *   execthread PATH    becomes another program, from a thread that is not the first
 *   exec PATH ARGS…
 */
#include "functions.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

using Function = long (*)(inside_t, long);
static const char *const names[4] = {"decode", "process", "synchronize", "encode"};
#ifdef LINKED
static Function functions[4] = {llama_decode, llama_process, llama_synchronize, llama_encode};
#else
static Function functions[4];
#endif

/* No stdio: its frames would lie deep below the caller's. */
static bool read_line(std::string &line) {
    line.clear();
    char c;
    while (read(0, &c, 1) == 1) {
        if (c == '\n')
            return true;
        line += c;
    }
    return false;
}

static void answer(const std::string &text) {
    std::string line = text + "\n";
    if (write(1, line.data(), line.size()) < 0)
        _exit(3);
}

static std::vector<std::string> split(const std::string &line) {
    std::vector<std::string> words;
    size_t at = 0;
    while (at <= line.size()) {
        size_t end = line.find(' ', at);
        if (end == std::string::npos)
            end = line.size();
        words.push_back(line.substr(at, end - at));
        at = end + 1;
    }
    return words;
}

static Function function(const std::string &name) {
    for (int i = 0; i < 4; i++)
        if (name == names[i])
            return functions[i];
    answer("no function " + name);
    _exit(3);
}

static long sum(Function f, long n) {
    long total = 0;
    for (long x = 0; x < n; x++)
        total += f(nullptr, x);
    return total;
}

static pthread_t start(void *(*run)(void *), void *argument) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 128 * 1024);
    pthread_t thread;
    if (pthread_create(&thread, &attributes, run, argument)) {
        answer("no thread");
        _exit(3);
    }
    pthread_attr_destroy(&attributes);
    return thread;
}

struct Job {
    Function f;
    long n;
    long result;
};

static void *run_job(void *argument) {
    Job *job = static_cast<Job *>(argument);
    job->result = sum(job->f, job->n);
    return nullptr;
}

static Function inner;
static long nested(long x) {
    return inner(nullptr, x);
}

static Function recursive;
static long recurse(long depth) {
    return depth ? recursive(recurse, depth - 1) : 0;
}

static int holding;
static long stay(long) {
    __atomic_add_fetch(&holding, 1, __ATOMIC_SEQ_CST);
    for (;;)
        pause();
}
static void *run_stay(void *argument) {
    reinterpret_cast<Function>(argument)(stay, 0);
    return nullptr;
}

static void *run_forever(void *argument) {
    Function f = reinterpret_cast<Function>(argument);
    const long expected = f(nullptr, 0);
    for (long x = 0;; x++) {
        if (f(nullptr, x & 7) != expected + 10 * (x & 7))
            _exit(4);
        if (x % 32 == 0) /* without pause the kernel hardly gets to remove a probe */
            usleep(500);
    }
}

static void *run_exec(void *argument) {
    const char *path = static_cast<const char *>(argument);
    execl(path, path, static_cast<char *>(nullptr));
    _exit(3);
}

static jmp_buf before;
static long obey(long);

static long obey_inside(long) {
    answer("inside");
    return obey(0);
}

static void *run_obey(void *) {
    obey(0);
    return nullptr;
}

static bool forked;

static void call_inside(Function f) {
    try {
        if (setjmp(before) == 0) {
            f(obey_inside, 0);
            if (forked)
                _exit(7);
            answer("returned");
        } else {
            answer("jumped");
        }
    } catch (int) {
        answer("caught");
    }
}

__attribute__((noinline)) static void deep_call(Function f) {
    volatile char room[64 * 1024];
    room[0] = 0;
    f(obey_inside, room[0]);
    room[0] = 2; /* not a tail call: the frame stays */
}

/* The exception passes deep_call's frame, so afterwards the stack is far above the call. */
__attribute__((noinline)) static void call_deep(Function f) {
    try {
        if (setjmp(before) == 0) {
            deep_call(f);
            answer("returned");
        } else {
            answer("jumped");
        }
    } catch (int) {
        answer("caught");
    }
}

static void children(long n, Function f) {
    for (long i = 0; i < n; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            f(nullptr, i);
            _exit(0);
        }
        waitpid(pid, nullptr, 0);
    }
}

/* Obeys lines until one ends the call that it stands in (0) or the input ends. */
static long obey(long) {
    std::string line;
    while (read_line(line)) {
        std::vector<std::string> w = split(line);
        const std::string &word = w[0];
        if (word == "load") {
            void *library = dlopen(line.c_str() + 5, RTLD_NOW | RTLD_LOCAL);
            if (!library) {
                answer(dlerror());
                continue;
            }
            for (int i = 0; i < 4; i++)
                functions[i] = reinterpret_cast<Function>(
                    dlsym(library, (std::string("llama_") + names[i]).c_str()));
            answer("loaded");
        } else if (word == "call") {
            answer(std::to_string(sum(function(w[1]), atol(w[2].c_str()))));
        } else if (word == "threads") {
            std::vector<Job> jobs(atol(w[1].c_str()), Job{function(w[2]), atol(w[3].c_str()), 0});
            std::vector<pthread_t> threads;
            for (Job &job : jobs)
                threads.push_back(start(run_job, &job));
            long total = 0;
            for (size_t i = 0; i < jobs.size(); i++) {
                pthread_join(threads[i], nullptr);
                total += jobs[i].result;
            }
            answer(std::to_string(total));
        } else if (word == "nest") {
            Function outer = function(w[1]);
            inner = function(w[2]);
            long total = 0;
            for (long x = 0; x < atol(w[3].c_str()); x++)
                total += outer(nested, x);
            answer(std::to_string(total));
        } else if (word == "recurse") {
            recursive = function(w[1]);
            answer(std::to_string(recurse(atol(w[2].c_str()))));
        } else if (word == "inside") {
            if (w[1] == "deep")
                call_deep(function(w[2]));
            else
                call_inside(function(w[1]));
        } else if (word == "return") {
            return 0;
        } else if (word == "throw") {
            throw 1;
        } else if (word == "longjmp") {
            longjmp(before, 1);
        } else if (word == "fork") {
            pid_t pid = fork();
            if (pid == 0) {
                forked = true;
                return 0; /* from a call that this process never entered */
            }
            answer(std::to_string(pid));
        } else if (word == "reap") {
            int status;
            waitpid(static_cast<pid_t>(atol(w[1].c_str())), &status, 0);
            answer(std::to_string(status));
        } else if (word == "thread") {
            pthread_t thread = start(run_obey, nullptr);
            pthread_join(thread, nullptr);
            answer("joined");
        } else if (word == "end") {
            return 0;
        } else if (word == "pthread_exit") {
            pthread_exit(nullptr);
        } else if (word == "cancel") {
            pthread_cancel(pthread_self());
            pthread_testcancel();
        } else if (word == "hold") {
            long n = atol(w[1].c_str());
            for (long i = 0; i < n; i++)
                start(run_stay, reinterpret_cast<void *>(function(w[2])));
            while (__atomic_load_n(&holding, __ATOMIC_SEQ_CST) < n)
                usleep(1000);
            answer("holding");
        } else if (word == "children") {
            children(atol(w[1].c_str()), function(w[2]));
            answer("called");
        } else if (word == "forever") {
            for (long i = 0; i < atol(w[1].c_str()); i++)
                start(run_forever, reinterpret_cast<void *>(function(w[2])));
            answer("running");
        } else if (word == "map") {
            int fd = open(line.c_str() + 5 + w[1].size(), O_RDONLY);
            for (long i = 0; i < atol(w[1].c_str()); i++) {
                void *at = mmap(nullptr, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
                if (at != MAP_FAILED) /* a directory, say */
                    munmap(at, 4096);
            }
            close(fd);
            answer("mapped");
        } else if (word == "execthread") {
            start(run_exec, const_cast<char *>(line.c_str() + 11));
            for (;;)
                pause();
        } else if (word == "exec") {
            std::vector<char *> arguments;
            for (size_t i = 1; i < w.size(); i++)
                arguments.push_back(const_cast<char *>(w[i].c_str()));
            arguments.push_back(nullptr);
            execv(arguments[0], arguments.data());
            answer("cannot exec");
        } else {
            answer("what is " + word + "?");
        }
    }
    _exit(0);
}

int main() {
    answer("ready");
    obey(0);
    return 0;
}
