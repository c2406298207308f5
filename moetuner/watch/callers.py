"""The processes that called llama.cpp: who they are, whether they count, what they do now.

Owner of all fields: the daemon's only thread. A process is held by a pidfd, so its end
is noticed at once and a reused pid is never taken for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
from collections.abc import Callable
from dataclasses import dataclass

from moetuner.log import INFO, NOTICE, Log, printable
from moetuner.watch import layout
from moetuner.watch.processes import Process, ProcFs
from moetuner.watch.program import Program

# A stack pointer this far above the entry's is on another stack (a coroutine), and says
# nothing; glibc's default thread stack is 8 MiB.
STACK_SPAN = 64 << 20


@dataclass
class Caller:
    """A process that called at least once and has not ended."""

    pid: int
    started: int
    first_ns: int  # of its kernel entry: another one is another program in the same pid
    name: str  # comm, printable
    exe: str  # printable
    counts: bool
    reason: str
    pidfd: int
    ticks: int | None = None  # processor time at the last sample of a long call


@dataclass(frozen=True)
class Look:
    """One sample: see activity.Sample, whose fields these are (seconds, CLOCK_MONOTONIC)."""

    last: float | None
    in_flight: float | None
    progress: bool


class Callers:
    """`judge` gives (counts, reason); `on_call(pid, name, at)` reports a transition of a
    process that counts; `on_end(pid)` that it has ended or runs another program."""

    def __init__(
        self,
        program: Program,
        proc: ProcFs,
        selector: selectors.BaseSelector,
        judge: Callable[[Process], tuple[bool, str]],
        on_call: Callable[[int, str, float], None],
        on_end: Callable[[int], None],
        log: Log,
    ) -> None:
        self._program = program
        self._proc = proc
        self._selector = selector
        self._judge = judge
        self._on_call = on_call
        self._on_end = on_end
        self._log = log
        self.known: dict[int, Caller] = {}
        self._ring = program.ring_buffer(self._record)
        selector.register(self._ring.fileno(), selectors.EVENT_READ, self._ring.consume)

    def _record(self, event: layout.Event) -> None:
        caller = self.known.get(event.pid)
        # A second first call: after exec, or when the kernel's table forgot it (judged anew
        # each time), or of two threads at once (the same entry, and nothing new).
        first = event.kind == layout.EVENT_FIRST
        if caller is not None and first and self._first_ns(event.pid) != caller.first_ns:
            self._drop(caller)
            caller = None
        if caller is None:
            caller = self._meet(event.pid)
        if caller is not None and caller.counts:
            self._on_call(caller.pid, caller.name, event.ns / 1e9)

    def _meet(self, pid: int) -> Caller | None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            self._erase(pid)
            return None
        first_ns = self._first_ns(pid)
        process = self._proc.process(pid)
        if process is None:
            os.close(pidfd)
            self._erase(pid)
            return None
        counts, reason = self._judge(process)
        caller = Caller(
            pid,
            process.started,
            first_ns,
            printable(process.comm),
            printable(process.exe),
            counts,
            reason,
            pidfd,
        )
        self.known[pid] = caller
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._ended(caller))
        self._tell_kernel(caller)
        if self._first_ns(pid) != first_ns:  # an exec meanwhile: not this program's verdict
            self._program.verdicts.delete(pid)
        self._say(caller)
        return caller

    def _first_ns(self, pid: int) -> int:
        """When the program in `pid` called first, as the kernel has it; 0 if it has not."""
        state = layout.ProcessState()
        return state.first_ns if self._program.processes.lookup(pid, state) else 0

    def _tell_kernel(self, caller: Caller) -> None:
        verdict = layout.VERDICT_COUNT if caller.counts else layout.VERDICT_IGNORE
        self._program.verdicts.update(caller.pid, ctypes.c_uint32(verdict))

    def _say(self, caller: Caller) -> None:
        if caller.counts:
            text = f"pid {caller.pid} {caller.name} keeps experts on the CPU: {caller.reason}"
            self._log(text, NOTICE)
        else:
            self._log(f"pid {caller.pid} {caller.name} does not count: {caller.reason}", INFO)

    def judge_again(self) -> None:
        """After a change of configuration: everyone who has called, by the new rules."""
        for caller in list(self.known.values()):
            process = self._proc.process(caller.pid)
            if process is None:
                continue
            counts, reason = self._judge(process)
            if (counts, reason) == (caller.counts, caller.reason):
                continue
            was_counted, caller.counts, caller.reason = caller.counts, counts, reason
            self._tell_kernel(caller)
            self._say(caller)
            if was_counted and not counts:
                self._on_end(caller.pid)
            elif counts:
                self._program.processes.delete(caller.pid)  # its next call is a first one

    def _ended(self, caller: Caller) -> None:
        if self.known.get(caller.pid) is not caller:
            return  # dropped in this same round: the pid is another process's already
        self._drop(caller)
        self._erase(caller.pid)

    def _drop(self, caller: Caller) -> None:
        del self.known[caller.pid]
        self._selector.unregister(caller.pidfd)
        os.close(caller.pidfd)
        if caller.counts:
            self._on_end(caller.pid)

    def _erase(self, pid: int) -> None:
        self._program.processes.delete(pid)
        self._program.verdicts.delete(pid)

    def calls(self, pid: int) -> int:
        """Entries seen so far."""
        state = layout.ProcessState()
        return state.calls if self._program.processes.lookup(pid, state) else 0

    def look(self, pid: int, quiet_since: float) -> Look:
        """What the process does now. Threads are examined only if its last entry or return
        is not later than `quiet_since`."""
        state = layout.ProcessState()
        if not self._program.processes.lookup(pid, state):
            return Look(None, None, False)
        last = state.last_ns / 1e9
        if last > quiet_since:
            return Look(last, None, True)
        in_flight = self._oldest_call(pid)
        return Look(last, in_flight, in_flight is not None and self._progress(pid))

    def _oldest_call(self, pid: int) -> float | None:
        oldest: int | None = None
        state = layout.ThreadState()
        for key in list(self._program.threads.keys()):
            if key >> 32 != pid or not self._program.threads.lookup(key, state):
                continue
            entered = [at for sp, at in zip(state.sp, state.entered_ns, strict=True) if sp]
            if entered and self._inside(pid, key & 0xFFFFFFFF, max(state.sp)):
                oldest = min([*entered, *([oldest] if oldest is not None else [])])
        return None if oldest is None else oldest / 1e9

    def _inside(self, pid: int, tid: int, outermost: int) -> bool:
        """False when the thread is gone, or waits with its stack above the call's entry."""
        if not self._proc.thread_alive(pid, tid):
            return False
        now = self._proc.stack_pointer(pid, tid)
        return now is None or not outermost <= now < outermost + STACK_SPAN

    def _progress(self, pid: int) -> bool:
        caller = self.known.get(pid)
        ticks = self._proc.cpu_ticks(pid)
        if caller is None or ticks is None:
            return False
        before, caller.ticks = caller.ticks, ticks
        return before is None or ticks > before or self._proc.waits_for_disk(pid)

    def close(self) -> None:
        self._selector.unregister(self._ring.fileno())
        self._ring.close()
        for caller in list(self.known.values()):
            with contextlib.suppress(KeyError):
                self._selector.unregister(caller.pidfd)
            os.close(caller.pidfd)
        self.known.clear()
