"""The user side of probes/inference.h: names, numbers and struct layouts.

tests/bpf/test_layout.py compares this file with the header that the kernel side uses.
"""

from __future__ import annotations

import ctypes

FUNCTIONS = ("llama_decode", "llama_process", "llama_synchronize", "llama_encode")
"""Index = FN_* of the header."""

FN_COUNT = len(FUNCTIONS)
EVENT_FIRST, EVENT_ACTIVE = 1, 2
VERDICT_IGNORE, VERDICT_COUNT = 1, 2
SETTING_REARM_NS = 0
COUNTER_LOST, COUNTER_UNMATCHED, COUNTER_UNWOUND, COUNTER_WAKEUPS = range(4)

MAPS = ("events", "threads", "processes", "verdicts", "settings", "counters")
ENTER = tuple(name.replace("llama_", "enter_") for name in FUNCTIONS)
LEAVE = tuple(name.replace("llama_", "leave_") for name in FUNCTIONS)
UPROBE_PROGRAMS = (*ENTER, *LEAVE, "leave_site")
TRACEPOINT_PROGRAMS = {"on_exit": "sched_process_exit", "on_exec": "sched_process_exec"}


class Event(ctypes.Structure):
    """struct event"""

    _fields_ = (
        ("ns", ctypes.c_uint64),
        ("pid", ctypes.c_uint32),
        ("tid", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("fn", ctypes.c_uint32),
        ("comm", ctypes.c_char * 16),
    )
    ns: int
    pid: int
    tid: int
    kind: int
    fn: int
    comm: bytes


class ProcessState(ctypes.Structure):
    """struct process_state"""

    _fields_ = (
        ("first_ns", ctypes.c_uint64),
        ("last_ns", ctypes.c_uint64),
        ("calls", ctypes.c_uint64),
        ("announced", ctypes.c_uint32),
        ("owed", ctypes.c_uint32),
    )
    first_ns: int
    last_ns: int
    calls: int
    announced: int
    owed: int


class ThreadState(ctypes.Structure):
    """struct thread_state"""

    _fields_ = (
        ("sp", ctypes.c_uint64 * FN_COUNT),
        ("entered_ns", ctypes.c_uint64 * FN_COUNT),
    )
    sp: ctypes.Array[ctypes.c_uint64]
    entered_ns: ctypes.Array[ctypes.c_uint64]
