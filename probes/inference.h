/* The layout that the kernel side (inference.bpf.c) and the user side
 * (moetuner/watch/layout.py) share. tests/bpf/test_layout.py holds the two
 * together. All fields are naturally aligned; there is no padding.
 *
 * Times are CLOCK_MONOTONIC nanoseconds (bpf_ktime_get_ns), the clock of
 * Python's time.monotonic_ns().
 */
#ifndef MOETUNER_INFERENCE_H
#define MOETUNER_INFERENCE_H

/* The functions of llama.cpp that mean inference; an index into thread_state. */
#define FN_DECODE 0
#define FN_PROCESS 1
#define FN_SYNCHRONIZE 2
#define FN_ENCODE 3
#define FN_COUNT 4

/* Why user space is woken. */
#define EVENT_FIRST 1  /* first call of a process that is not in `processes` */
#define EVENT_ACTIVE 2 /* first call of a known process after `rearm_ns` of silence */

struct event {
    u64 ns;
    u32 pid; /* thread group, in the initial pid namespace */
    u32 tid;
    u32 kind; /* EVENT_* */
    u32 fn;   /* FN_* */
    char comm[16];
};

/* `processes`: pid -> this. Written by the kernel side alone; user space deletes
 * the entry when the process has ended. Fields are written without a lock: two
 * threads may lose one of two `last_ns` writes that are nanoseconds apart, and
 * nothing depends on which one stays. */
struct process_state {
    u64 first_ns; /* of the entry, and so of the program that runs in the process */
    u64 last_ns; /* last entry or return seen */
    u64 calls;   /* entries; atomic add */
    u32 announced; /* 1 once the EVENT_FIRST record went out: a lost one is sent again */
    u32 owed;      /* 1 while an EVENT_ACTIVE record was lost: the next call sends it */
};

/* `threads`: (pid << 32 | tid) -> this. A slot of 0 means: not inside. The stack
 * pointer on entry identifies the activation: a return belongs to it only at the
 * same stack pointer, and it is over for certain once the thread enters any probed
 * function at the same or a higher one (stacks grow down): so a call that an
 * exception unwound is forgotten at the thread's next call. */
struct thread_state {
    u64 sp[FN_COUNT];
    u64 entered_ns[FN_COUNT];
};

/* `verdicts`: pid -> u32. Written by user space alone; absent means not judged yet. */
#define VERDICT_IGNORE 1
#define VERDICT_COUNT 2

/* `settings`: index -> u64, written by user space. */
#define SETTING_REARM_NS 0 /* silence after which a call wakes user space again */
#define SETTING_COUNT 1

/* `counters`: index -> u64, atomic adds; read by user space. */
#define COUNTER_LOST 0      /* records that found the ring buffer full */
#define COUNTER_UNMATCHED 1 /* returns without a known entry */
#define COUNTER_UNWOUND 2   /* activations found to have been left without a return */
#define COUNTER_WAKEUPS 3   /* records written */
#define COUNTER_COUNT 4

#endif
