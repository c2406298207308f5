"""The scenes of the demonstration and what must hold in each."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moetuner.demo.board import FREQUENCIES, Board
from moetuner.demo.console import Console
from moetuner.demo.record import MHZ, Entry, Recorder, Window, delay_of, time_line
from moetuner.demo.services import Answer, Daemon, LlamaServer
from moetuner.errors import SystemRefused

PROMPT = "The small board on the desk woke up and "
HOLD_S = 1.0
# A fall is late by the daemon's and our own wake-up, and by whatever else the machine does.
FALL_S = (HOLD_S - 0.05, HOLD_S + 1.0)
# Well under a millisecond where a core is free; a busy machine adds its scheduler's
# delays (to the daemon and to our own time stamps), and a poller would need 100 ms.
RAISE_LIMIT_S = 0.02
LOWEST, HIGHEST = FREQUENCIES[0], FREQUENCIES[-1]
STYLES = {"journal": "cyan", "min_freq": "green", "request": "bold", "answer": "bold"}


@dataclass(frozen=True)
class Check:
    """One thing that must hold, in a sentence with its figures."""

    held: bool
    text: str


@dataclass
class Outcome:
    """What the scenes found; grows while they run."""

    checks: list[Check] = field(default_factory=list)
    raises_s: list[float] = field(default_factory=list)
    falls_s: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return bool(self.checks) and all(check.held for check in self.checks)


class Stage:
    """Plays scenes and prints their time lines. `witnessed`: calls come from the kernel."""

    def __init__(self, console: Console, board: Board, recorder: Recorder, witnessed: bool) -> None:
        self._console = console
        self._board = board
        self._recorder = recorder
        self._witnessed = witnessed
        self.outcome = Outcome()

    def idle(self, seconds: float) -> None:
        """Servers run, nobody asks: nothing may happen."""
        begin = self._open(f"Both servers idle for {seconds:g} s")
        time.sleep(seconds)
        window = self._close(begin)
        self._check(not window.changes, f"an idle server left min_freq alone for {seconds:g} s")
        self._check(not _floor_lines(window), "and the journal got no line about the floor")

    def requests(self, server: LlamaServer, count: int, tokens: int) -> None:
        """One after the other, each after the floor is back down."""
        for number in range(1, count + 1):
            self._request(f"Request {number} of {count} to {server.name}", server, tokens)

    def long(self, server: LlamaServer, seconds: float) -> None:
        """One request that takes about so long; call it after shorter ones."""
        speed = statistics.median(self.outcome.tokens_per_second)
        self._request(f"One long request to {server.name}", server, round(seconds * speed))

    def _request(self, title: str, server: LlamaServer, tokens: int) -> None:
        begin = self._open(title)
        entries = self._ask(server, tokens)
        self._settle()
        window = self._close(begin, entries)
        self._check_one_raise(window, entries[-1].at)

    def pair(self, server: LlamaServer, tokens: int, gap_s: float) -> None:
        """Two requests closer together than `hold`: the floor stays up between them."""
        begin = self._open(f"Two requests with {gap_s:g} s between them")
        entries = self._ask(server, tokens)
        time.sleep(gap_s)
        entries += self._ask(server, tokens)
        self._settle()
        window = self._close(begin, entries)
        self._check_one_raise(window, entries[-1].at)

    def dense(self, server: LlamaServer, tokens: int) -> None:
        """A model without experts: it decodes, and nothing happens."""
        begin = self._open(f"A request to {server.name} on a dense model")
        entries = self._ask(server, tokens)
        time.sleep(0.5)
        window = self._close(begin, entries)
        if self._witnessed:
            self._check(bool(window.calls), f"the dense model made {len(window.calls)} calls")
        self._check(not window.changes, "and min_freq did not move")

    def killed(self, server: LlamaServer) -> None:
        """SIGKILL in the middle of a decode."""
        begin = self._open("llama-server is killed in the middle of a decode")
        entries = self._ask_and_interrupt(server, server.kill, "SIGKILL to llama-server")
        self._settle()
        window = self._close(begin, entries)
        ended = entries[-1].at
        falls = [fall for fall in window.falls if fall.at >= ended]
        self._check(bool(window.raises), "the floor was up while it decoded")
        after = f" {falls[0].at - ended:.2f} s after the kill" if falls else ""
        self._check(
            bool(falls) and falls[0].at - ended <= FALL_S[1] and self._floor_is_low(),
            f"a killed server does not hold the floor: it was back{after}",
        )

    def daemon_ends(self, daemon: Daemon, server: LlamaServer) -> None:
        """SIGTERM to the daemon while the floor is up."""
        begin = self._open("The daemon is stopped in the middle of a decode")
        statuses: list[int] = []
        entries = self._ask_and_interrupt(
            server, lambda: statuses.append(daemon.stop()), "SIGTERM to the daemon"
        )
        self._close(begin, entries)
        self._check(statuses == [0], f"the daemon ended with status {statuses[0]}")
        self._check(self._floor_is_low(), "and left min_freq as it had found it")

    def raise_delay(self) -> None:
        """Judges all raises so far together."""
        delays = self.outcome.raises_s
        if not delays:
            return
        self._open("From the first call to the floor, all requests together")
        median = statistics.median(delays)
        self._check(
            median <= RAISE_LIMIT_S,
            f"the floor was up {median * 1000:.2f} ms after the first call "
            f"(median of {len(delays)}, from {min(delays) * 1000:.2f} to "
            f"{max(delays) * 1000:.2f} ms; limit {RAISE_LIMIT_S * 1000:g} ms)",
        )

    def _open(self, title: str) -> float:
        self._console.line()
        self._console.step(title)
        return time.monotonic()

    def _close(self, begin: float, entries: Sequence[Entry] = ()) -> Window:
        time.sleep(0.2)  # lines on their way: the kernel hands its records over in batches
        window = self._recorder.since(begin)
        for entry in sorted([*entries, *time_line(window)], key=lambda entry: entry.at):
            kind = self._console.style(f"{entry.kind:<8}", STYLES.get(entry.kind, "dim"))
            self._console.line(f"  t = {entry.at - begin:7.4f} s  {kind}  {entry.text}")
        return window

    def _ask(self, server: LlamaServer, tokens: int) -> list[Entry]:
        sent = time.monotonic()
        answer = server.complete(PROMPT, tokens)
        self.outcome.tokens_per_second.append(answer.tokens_per_second)
        return [
            Entry(sent, "request", f"{tokens} tokens from pid {server.pid} ({server.name})"),
            Entry(time.monotonic(), "answer", _shown(answer)),
        ]

    def _ask_and_interrupt(
        self, server: LlamaServer, interrupt: Callable[[], object], what: str
    ) -> list[Entry]:
        """Sends a request too long to finish and interrupts when the floor has been up."""
        sent = time.monotonic()

        def ask() -> None:
            try:
                server.complete(PROMPT, 15_000)
            except SystemRefused:
                return  # it was interrupted, as it should be

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        self._await(lambda: self._board.floor() == HIGHEST, 5.0)
        time.sleep(0.3)
        moment = time.monotonic()
        interrupt()
        return [
            Entry(sent, "request", f"a long one to pid {server.pid} ({server.name})"),
            Entry(moment, "signal", what),
        ]

    def _settle(self) -> None:
        """Waits for the end of the activity: the fall and a little more."""
        self._recorder.wait_until_low(FALL_S[1] + 2.0)

    def _await(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _floor_is_low(self) -> bool:
        return self._board.floor() == LOWEST

    def _check(self, held: bool, text: str) -> None:
        self.outcome.checks.append(Check(held, text))
        self._console.check(held, text)

    def _check_one_raise(self, window: Window, answered: float) -> None:
        raises, falls = window.raises, window.falls
        held = (
            [change.after for change in raises] == [HIGHEST]
            and [change.after for change in falls] == [LOWEST]
            and raises[0].at < answered < falls[0].at
        )
        self._check(
            held,
            f"one raise to {HIGHEST // MHZ} MHz while it decoded, one return to "
            f"{LOWEST // MHZ} MHz ({len(raises)} and {len(falls)} seen)",
        )
        if not held:
            return
        rose = delay_of(raises[0], window.calls)
        if rose is not None:
            self.outcome.raises_s.append(rose)
        fell, cause = delay_of(falls[0], window.calls), "last call"
        if fell is None:
            fell, cause = falls[0].at - answered, "answer"
        self.outcome.falls_s.append(fell)
        self._check(
            FALL_S[0] <= fell <= FALL_S[1],
            f"back {fell:.3f} s after the {cause} (hold is {HOLD_S:g} s)",
        )
        self._check(len(_floor_lines(window)) == 2, "one journal line for each of the two")


def _floor_lines(window: Window) -> list[str]:
    return [line.text for line in window.journal if line.text.startswith("floor ")]


def _shown(answer: Answer) -> str:
    text = " ".join(answer.text.split())[:44]
    return f"{answer.tokens} tokens, {answer.tokens_per_second:.0f}/s: “{text}…”"


def servers(
    program: Path, moe: Path, dense: Path, logs: Path, start: Callable[[LlamaServer], None]
) -> tuple[LlamaServer, LlamaServer]:
    """The two llama-servers, ready; `start` is told of each as soon as it runs."""
    experts = LlamaServer(program, moe, logs / "llama-server-moe.log", ["--cpu-moe"])
    start(experts)
    plain = LlamaServer(program, dense, logs / "llama-server-dense.log")
    start(plain)
    experts.await_ready()
    plain.await_ready()
    return experts, plain
