"""The daemon: composition root and the loop.

One thread waits for descriptors and for the next deadline. Ring buffer records, ended
processes, new mappings, hotplug and signals are descriptors; the end of a hold time,
the once-a-second look at a raised floor, rescans, status and the watchdog are deadlines.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import sdnotify

from moetuner import activity, config, floor, moe, status
from moetuner.board.actuator import Actuator
from moetuner.board.baseline import BaselineFile
from moetuner.board.hotplug import Hotplug
from moetuner.board.instance import only_one
from moetuner.board.sysroot import SysRoot
from moetuner.board.throttle import Throttle
from moetuner.board.touch import Touch
from moetuner.config import Config
from moetuner.errors import ConfigError
from moetuner.floor_events import (
    Action,
    Configure,
    Demand,
    Event,
    Gone,
    Policy,
    RestoreMin,
    Stop,
    Throttling,
    Tick,
    Touched,
    WriteMin,
)
from moetuner.log import ERROR, INFO, NOTICE, WARNING, Log
from moetuner.watch.processes import Process
from moetuner.watch.watcher import Report, Watcher

NODE_MISSING_RESCAN_S = 5.0  # in case the hotplug event was lost; lists one directory
NODE_RESCAN_S = 60.0
# A look at the raised floor that is due this soon is taken in a wake-up for something else,
# so that tokens cost one wake-up a second, not three.
SLACK_S = 0.5


@dataclass(frozen=True)
class Options:
    root: Path = Path("/")
    config: Path = config.DEFAULT_PATH
    config_optional: bool = True


class Daemon:
    """Owner of everything it composes; `run` returns when SIGTERM or SIGINT came.

    Raises MoetunerError (see errors.py) when it cannot start. Whatever ends it, min_freq
    is put back on the way out, and by `moetuner restore` if there was no way out.
    """

    def __init__(self, options: Options, log: Log, clock: Callable[[], float] = time.monotonic):
        self._options = options
        self._log = log
        self._clock = clock
        self._root = SysRoot(options.root)
        self._config = config.load(options.config, optional=options.config_optional)
        self._config_error: str | None = None
        self._manager = sdnotify.SystemdNotifier()
        if self._manager.socket is not None:
            # One that does not read its socket must not stop us: a notice is lost then.
            self._manager.socket.setblocking(False)
        self._summarised = ""  # the last STATUS
        self._selector = selectors.EpollSelector()
        self._activity = activity.Activity(self._config.floor.hold_s)
        self._floor = floor.State(_policy(self._config))
        self._told = ""  # the demand as the floor knows it
        self._slack_s = SLACK_S
        self._overtaken: bool | None = None  # a write that ours went over
        self._node_scan_at = 0.0
        self._status = status.Writer(self._root)
        self._stopping = False
        self._started = time.time()
        self._watchdog_s = _watchdog_s()
        self._watchdog_at = 0.0

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(only_one(self._root))
            _go_first()
            wake = stack.enter_context(_signals())
            self._selector.register(wake, selectors.EVENT_READ, lambda: self._signalled(wake))
            self._throttle = Throttle(self._root)
            self._actuator = Actuator(
                self._root, BaselineFile(self._root), self._log, self._config.floor.node
            )
            self._touch = stack.enter_context(contextlib.closing(Touch(self._root)))
            self._selector.register(self._touch, selectors.EVENT_READ, self._touched)
            self._hotplug = Hotplug()
            self._poll_hotplug(None)
            if self._hotplug.problem:
                self._log(self._hotplug.problem, WARNING)
            self._look_for_node()
            self._watcher = stack.enter_context(
                contextlib.closing(
                    Watcher(
                        self._config.watch,
                        Report(self._judge, self._on_call, self._on_end, self._status.touch),
                        self._selector,
                        self._clock,
                        self._log,
                    )
                )
            )
            self._watcher.set_hold(self._config.floor.hold_s)
            self._log(f"compiled against {self._watcher.program.headers}", INFO)
            self._watcher.tick()
            self._notify("READY=1", *self._status_notice())
            self._log("ready", INFO)
            try:
                while not self._stopping:
                    self._turn()
            finally:
                self._notify("STOPPING=1")
                self._settle(Stop())
                self._status.remove()

    # The loop

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._timeout()):
            key.data()
        now = self._clock()
        self._watcher.tick()
        self._sample(now)
        self._demand()
        due = floor.deadline(self._floor)
        if due is not None and due <= now + self._slack_s:
            self._slack_s = SLACK_S
            self._settle(Throttling(self._throttle.read()))
            self._settle(Tick(), max(now, due))
        if now >= self._node_scan_at:
            self._look_for_node()
        if self._status.due(now):
            problem = self._status.write(self._snapshot(), now)
            if problem:
                self._log(f"{problem}: moetuner status will not work", WARNING)
            self._notify(*self._status_notice())
        if self._watchdog_s and now >= self._watchdog_at:
            self._notify("WATCHDOG=1")
            self._watchdog_at = now + self._watchdog_s

    def _timeout(self) -> float:
        deadlines = [
            self._watcher.deadline,
            self._node_scan_at,
            self._activity.deadline,
            floor.deadline(self._floor),
            self._status.deadline,
            self._watchdog_at if self._watchdog_s else None,
        ]
        return max(0.0, min(d for d in deadlines if d is not None) - self._clock())

    # From the probe to the floor

    def _judge(self, process: Process) -> tuple[bool, str]:
        verdict = moe.judge(process.argv, process.environ, process.exe, self._config.match)
        return verdict.counts, verdict.reason

    def _on_call(self, pid: int, name: str, at: float) -> None:
        # At once, not at the end of the turn: a token waits for this.
        self._activity = activity.step(self._activity, activity.Call(pid, name, at), self._clock())
        self._demand()

    def _on_end(self, pid: int) -> None:
        self._activity = activity.step(self._activity, activity.Ended(pid), self._clock())
        self._status.touch()

    def _sample(self, now: float) -> None:
        for pid in self._activity.due(now):
            look = self._watcher.look(pid, now - self._activity.hold)
            sample = activity.Sample(pid, look.last, look.in_flight, look.progress)
            self._activity = activity.step(self._activity, sample, now)
            self._status.count()

    def _demand(self) -> None:
        who = self._activity.who
        if who != self._told:
            if who and self._actuator.node is None:
                self._look_for_node()
            self._told = who
            self._settle(Demand(bool(who), who))

    def _settle(self, event: Event, now: float | None = None) -> None:
        at = self._clock() if now is None else now
        before = floor.raised_hz(self._floor)
        # What others wrote until now is told first: in terms of what was held then.
        touched = self._touch.drain()
        events = [event] if touched is None else [Touched(touched), event]
        while events:
            if isinstance(events[0], Touched):
                self._slack_s = 0.0  # whoever writes may not be done: no look before its time
            self._floor = floor.settle(self._floor, events.pop(0), at, self._carry_out)
            if self._overtaken is not None:
                events.append(Touched(self._overtaken))
                self._overtaken = None
        if floor.raised_hz(self._floor) != before or not isinstance(event, Tick | Throttling):
            self._status.touch()

    def _carry_out(self, action: Action) -> Event | None:
        if not isinstance(action, WriteMin | RestoreMin):
            answer = self._actuator.carry_out(action)
            self._noticed_loss(answer)
            return answer
        self._overtaken = self._touch.drain()  # somebody else, since we looked
        answer = self._actuator.carry_out(action)
        self._touch.drain()  # that was us
        self._noticed_loss(answer)
        return answer

    def _noticed_loss(self, answer: Event | None) -> None:
        if isinstance(answer, Gone):
            self._touch.watch(None)  # it comes back as other files under the same name
            self._node_scan_at = min(self._node_scan_at, self._clock() + NODE_MISSING_RESCAN_S)

    # The node

    def _look_for_node(self, removed: frozenset[str] = frozenset()) -> None:
        for event in self._actuator.look(removed):
            self._noticed_loss(event)
            self._settle(event)
        self._touch.watch(self._actuator.node)
        missing = self._actuator.node is None
        self._node_scan_at = self._clock() + (NODE_MISSING_RESCAN_S if missing else NODE_RESCAN_S)

    def _plugged(self) -> None:
        fd = self._hotplug.fileno()
        changes = self._hotplug.drain()
        self._poll_hotplug(fd)
        if changes.any:
            self._look_for_node(changes.removed)
        if changes.cpus:
            self._watcher.cpus_changed()

    def _poll_hotplug(self, before: int | None) -> None:
        """The descriptor may change when its socket had to be opened again."""
        fd = self._hotplug.fileno()
        if fd == before:
            return
        if before is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(before)
        if fd is not None:
            self._selector.register(fd, selectors.EVENT_READ, self._plugged)

    def _touched(self) -> None:
        min_freq = self._touch.drain()
        if min_freq is not None:
            self._settle(Touched(min_freq))

    # Signals

    def _signalled(self, wake: socket.socket) -> None:
        for number in wake.recv(64):
            if number == signal.SIGHUP:
                self._reload()
            else:
                self._log(f"stopping ({signal.Signals(number).name})", INFO)
                self._stopping = True

    def _reload(self) -> None:
        self._notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            new = config.load(self._options.config, optional=self._options.config_optional)
        except ConfigError as error:
            self._config_error = error.message
            self._log(f"configuration not reloaded, the old one stays: {error}", ERROR)
        else:
            self._config, self._config_error = new, None
            self._apply(new)
            self._log(f"configuration reloaded from {new.source}", NOTICE)
        self._status.touch()
        self._notify("READY=1", *self._status_notice())

    def _apply(self, new: Config) -> None:
        self._activity = activity.set_hold(self._activity, new.floor.hold_s, self._clock())
        self._watcher.set_hold(new.floor.hold_s)
        self._watcher.configure(new.watch)
        self._watcher.callers.judge_again()
        self._actuator.configured = new.floor.node
        self._look_for_node()
        self._settle(Configure(_policy(new)))

    # Status

    def _notify(self, *lines: str) -> None:
        """To the service manager, if there is one."""
        if lines:
            # sdnotify encodes as latin-1, and drops what does not fit; systemd wants UTF-8.
            self._manager.notify("\n".join(lines).encode().decode("latin-1"))

    def _status_notice(self) -> tuple[str, ...]:
        """STATUS=…, if it is another than before."""
        summary = self._summary()
        if summary == self._summarised:
            return ()
        self._summarised = summary
        return (f"STATUS={summary}",)

    def _summary(self) -> str:
        if self._actuator.node is None:
            return "waiting for a GPU devfreq node"
        hz = floor.raised_hz(self._floor)
        attached = sum(1 for lib in self._watcher.libraries.known.values() if lib.links)
        who = self._told or "idle, but not put back yet"
        held = f"floor {floor.mhz(hz)} ({who})" if hz else "idle"
        return f"{held}; {attached} llama.cpp {'file' if attached == 1 else 'files'} watched"

    def _snapshot(self) -> status.Snapshot:
        return status.snapshot(
            config=self._config,
            config_error=self._config_error,
            node=self._actuator.node,
            state=self._floor,
            active=self._activity,
            watcher=self._watcher,
            started=self._started,
            pid=os.getpid(),
            now=self._clock(),
        )


def _go_first() -> None:
    """Runs before the program whose first call it reacts to.

    llama.cpp keeps every core busy, and among equals the daemon would wait a time slice of
    3 ms and more. It runs for half a millisecond a second. Helpers start as ordinary
    processes (RESET_ON_FORK).
    """
    try:
        policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(1))
    except OSError:  # the unit's control group has no real-time share, or no RLIMIT_RTPRIO
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -10)


def _policy(settings: Config) -> Policy:
    return Policy(settings.floor.frequency_hz, settings.floor.yield_to_throttling)


def _watchdog_s() -> float | None:
    """Half of what systemd allows between two WATCHDOG=1, in seconds."""
    text = os.environ.get("WATCHDOG_USEC", "")
    return int(text) / 2e6 if text.isdigit() and int(text) > 0 else None


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket that gets a byte, the signal's number, for each SIGTERM, SIGINT, SIGHUP."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(theirs.fileno())
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)  # nothing interrupts the clean-up
