/* Who infers with llama.cpp, and when. Compiled by bcc (moetuner/watch/loader.py).
 *
 * A token must not cost a wake-up of user space: entries and returns only update
 * maps, and a ring buffer record is written on transitions alone (a process's first
 * call; a call after `rearm_ns` of silence). User space reads the maps when its own
 * hold time is over.
 *
 * rearm_ns is half of user space's hold time. User space lets go only after `hold`
 * of silence, so any call after that is a transition here: no call can fall between
 * "user space looked" and "the kernel will wake it again", and no barrier is needed.
 *
 * No kernel structure is read (pt_regs is the ABI of the probe itself), so headers of
 * another kernel compile the same program.
 */
#include <uapi/linux/ptrace.h>
#include "inference.h"

BPF_RINGBUF_OUTPUT(events, 16); /* pages: 64 KiB, about 1,300 records */
/* LRU: 10,000 threads inside a call at once must not make the map refuse new ones;
 * the oldest activation is forgotten instead, which can only end a hold early. */
BPF_TABLE("lru_hash", u64, struct thread_state, threads, 4096);
BPF_TABLE("lru_hash", u32, struct process_state, processes, 1024);
BPF_TABLE("lru_hash", u32, u32, verdicts, 1024);
BPF_ARRAY(settings, u64, SETTING_COUNT);
BPF_ARRAY(counters, u64, COUNTER_COUNT);

static __always_inline void count(u32 index) {
    u64 *value = counters.lookup(&index);
    if (value)
        __sync_fetch_and_add(value, 1);
}

/* 1 if the record went out. */
static __always_inline int tell(u32 kind, u32 fn, u64 id, u64 now) {
    struct event *event = events.ringbuf_reserve(sizeof(struct event));
    if (!event) {
        count(COUNTER_LOST);
        return 0;
    }
    event->ns = now;
    event->pid = id >> 32;
    event->tid = (u32)id;
    event->kind = kind;
    event->fn = fn;
    bpf_get_current_comm(event->comm, sizeof(event->comm));
    events.ringbuf_submit(event, 0);
    count(COUNTER_WAKEUPS);
    return 1;
}

static __always_inline int enter(struct pt_regs *ctx, u32 fn) {
    u64 id = bpf_get_current_pid_tgid();
    u32 pid = id >> 32;
    u32 *verdict = verdicts.lookup(&pid);
    if (verdict && *verdict == VERDICT_IGNORE)
        return 0;

    u64 now = bpf_ktime_get_ns();
    u64 sp = PT_REGS_SP(ctx);

    struct thread_state *thread = threads.lookup(&id);
    if (!thread) {
        struct thread_state empty = {};
        threads.update(&id, &empty);
        thread = threads.lookup(&id);
    }
    if (thread) {
#pragma unroll
        for (int i = 0; i < FN_COUNT; i++) {
            /* A live outer activation has a higher stack pointer than ours. */
            if (thread->sp[i] && thread->sp[i] <= sp) {
                thread->sp[i] = 0;
                count(COUNTER_UNWOUND);
            }
        }
        /* Recursion: the outermost activation of a function is the one that counts. */
        if (!thread->sp[fn]) {
            thread->entered_ns[fn] = now;
            thread->sp[fn] = sp;
        }
    }

    struct process_state *process = processes.lookup(&pid);
    if (!process) {
        struct process_state fresh = {.first_ns = now, .last_ns = now};
        processes.insert(&pid, &fresh); /* fails if another thread was first */
        process = processes.lookup(&pid);
        if (!process)
            return 0;
    }
    __sync_fetch_and_add(&process->calls, 1);
    if (!process->announced) {
        if (tell(EVENT_FIRST, fn, id, now))
            process->announced = 1;
        process->last_ns = now;
        return 0;
    }
    u32 index = SETTING_REARM_NS;
    u64 *rearm = settings.lookup(&index);
    /* last_ns may lie ahead of `now`: another thread on another core was later. */
    int silent = rearm && now > process->last_ns && now - process->last_ns >= *rearm;
    if (silent || process->owed)
        process->owed = !tell(EVENT_ACTIVE, fn, id, now);
    process->last_ns = now;
    return 0;
}

static __always_inline void touch(u64 id) {
    u32 pid = id >> 32;
    struct process_state *process = processes.lookup(&pid);
    if (process)
        process->last_ns = bpf_ktime_get_ns();
}

#ifdef __x86_64__
#define RETURN_ADDRESS 8 /* the return has taken it off the stack */
#else
#define RETURN_ADDRESS 0
#endif

/* Return seen by a uretprobe of function `fn`. */
static __always_inline int leave(struct pt_regs *ctx, u32 fn) {
    u64 id = bpf_get_current_pid_tgid();
    struct thread_state *thread = threads.lookup(&id);
    if (!thread || !thread->sp[fn]) {
        u32 pid = id >> 32;
        u32 *verdict = verdicts.lookup(&pid);
        if (!verdict || *verdict != VERDICT_IGNORE)
            count(COUNTER_UNMATCHED);
        return 0;
    }
    /* Recursion: the outermost activation lies higher than one that returns now. */
    if (thread->sp[fn] <= PT_REGS_SP(ctx) - RETURN_ADDRESS)
        thread->sp[fn] = 0;
    touch(id);
    return 0;
}

int enter_decode(struct pt_regs *ctx) { return enter(ctx, FN_DECODE); }
int enter_process(struct pt_regs *ctx) { return enter(ctx, FN_PROCESS); }
int enter_synchronize(struct pt_regs *ctx) { return enter(ctx, FN_SYNCHRONIZE); }
int enter_encode(struct pt_regs *ctx) { return enter(ctx, FN_ENCODE); }
int leave_decode(struct pt_regs *ctx) { return leave(ctx, FN_DECODE); }
int leave_process(struct pt_regs *ctx) { return leave(ctx, FN_PROCESS); }
int leave_synchronize(struct pt_regs *ctx) { return leave(ctx, FN_SYNCHRONIZE); }
int leave_encode(struct pt_regs *ctx) { return leave(ctx, FN_ENCODE); }

/* A return instruction that the functions can end in (their own, or that of a function
 * they tail-call, which others call too): the activation whose entry had this stack
 * pointer is over; anything else is somebody else's return. */
int leave_site(struct pt_regs *ctx) {
    u64 id = bpf_get_current_pid_tgid();
    struct thread_state *thread = threads.lookup(&id);
    if (!thread)
        return 0;
    u64 sp = PT_REGS_SP(ctx);
    int ours = 0;
#pragma unroll
    for (int i = 0; i < FN_COUNT; i++) {
        if (thread->sp[i] && thread->sp[i] <= sp) {
            ours |= thread->sp[i] == sp;
            thread->sp[i] = 0;
        }
    }
    if (ours)
        touch(id);
    return 0;
}

/* Any thread of the machine ends: whatever it was inside of is over. The process's own
 * entry is deleted by user space, which holds a pidfd on it. */
int on_exit(struct bpf_raw_tracepoint_args *ctx) {
    u64 id = bpf_get_current_pid_tgid();
    threads.delete(&id);
    return 0;
}

/* Another program in the same pid: it is unknown again. args[1] is the caller's tid
 * before the thread group was reduced to it. */
int on_exec(struct bpf_raw_tracepoint_args *ctx) {
    u64 id = bpf_get_current_pid_tgid();
    u32 pid = id >> 32;
    u64 old = ((u64)pid << 32) | (u32)ctx->args[1];
    threads.delete(&id);
    threads.delete(&old);
    /* In this order: user space looks for the process again after it wrote a verdict. */
    processes.delete(&pid);
    verdicts.delete(&pid);
    return 0;
}
