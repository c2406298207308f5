/* Calls decode of a library as told on standard input, and says when it did.
 *
 *     caller LIBRARY SYMBOL [any flags, so that its command line counts]
 *
 * Lines in: `call N` calls N times in a row; `rate N HZ` calls N times at HZ a second;
 * `until FILE TEXT` calls once and reads FILE over and over until it begins with TEXT.
 * Line out: nanoseconds from just before the first call to the end.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int main(int argc, char **argv) {
    if (argc < 3)
        return 2;
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 3;
    }
    int (*decode)(void *, int) = (int (*)(void *, int))dlsym(library, argv[2]);
    if (!decode)
        return 3;
    char line[4096];
    while (fgets(line, sizeof line, stdin)) {
        char path[3000], text[100];
        long count;
        double rate;
        long long start = now();
        if (sscanf(line, "call %ld", &count) == 1) {
            for (long i = 0; i < count; i++)
                decode(NULL, 0);
        } else if (sscanf(line, "rate %ld %lf", &count, &rate) == 2) {
            for (long i = 0; i < count; i++) {
                decode(NULL, 0);
                long long next = start + (long long)((i + 1) * 1e9 / rate);
                struct timespec t = {next / 1000000000LL, next % 1000000000LL};
                while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
                    ;
            }
        } else if (sscanf(line, "until %2999s %99s", path, text) == 2) {
            int file = open(path, O_RDONLY | O_CLOEXEC);
            char seen[100];
            start = now();
            decode(NULL, 0);
            ssize_t length;
            do {
                length = pread(file, seen, sizeof seen, 0);
                if (now() - start > 5000000000LL)
                    return 4; /* nobody raised it within five seconds */
            } while (length < (ssize_t)strlen(text) || strncmp(seen, text, strlen(text)) != 0);
            close(file);
        } else {
            return 2;
        }
        printf("%lld\n", now() - start);
        fflush(stdout);
    }
    return 0;
}
