"""Devfreq devices that come and go; and how it gets on without events."""

from __future__ import annotations

import errno
import os
import select
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from moetuner.board import hotplug
from moetuner.board.hotplug import Changes, Hotplug, Monitor
from moetuner.errors import MissingRequirement


@dataclass(frozen=True)
class Device:
    action: str | None
    sys_name: str
    subsystem: str = "devfreq"


class FakeMonitor:
    """A socket with events in it; an errno stands for a poll that fails."""

    def __init__(self, *events: Device | int) -> None:
        self._events = list(events)
        self.polls: list[float | None] = []

    def fileno(self) -> int:
        return 42

    def poll(self, timeout: float | None = None) -> Device | None:
        self.polls.append(timeout)
        if not self._events:
            return None
        event = self._events.pop(0)
        if isinstance(event, int):
            raise OSError(event, os.strerror(event))
        return event


class Connections:
    """Hands out monitors one after the other; then there are no more."""

    def __init__(self, *monitors: FakeMonitor) -> None:
        self._monitors = list(monitors)

    def __call__(self) -> Monitor:
        if not self._monitors:
            raise MissingRequirement("no hotplug events: Permission denied")
        return self._monitors.pop(0)


def test_nothing_happened() -> None:
    monitor = FakeMonitor()
    events = Hotplug(Connections(monitor))
    assert events.problem is None
    assert events.fileno() == 42
    assert events.drain() == Changes()
    assert monitor.polls == [0]  # never waits


def test_everything_that_waits_is_drained() -> None:
    events = Hotplug(
        Connections(
            FakeMonitor(
                Device("add", "15340000.vic"),
                Device("remove", "17000000.gpu"),
                Device("add", "17000000.gpu"),
                Device("unbind", "gpu-gpc-0"),
                Device("change", "bwmgr"),
            )
        )
    )
    assert events.drain() == Changes(True, frozenset({"17000000.gpu", "gpu-gpc-0"}))
    assert events.drain() == Changes()


def test_a_buffer_that_ran_over_is_replaced_and_asks_for_a_look() -> None:
    """pyudev never reads such a socket again: a loop that polls it would spin."""
    events = Hotplug(
        Connections(
            FakeMonitor(Device("remove", "17000000.gpu"), errno.ENOBUFS),
            FakeMonitor(Device("add", "17000000.gpu")),
        )
    )
    assert events.drain() == Changes(True, frozenset({"17000000.gpu"}), cpus=True)
    assert events.fileno() == 42
    assert events.problem is None
    assert events.drain() == Changes(True)


def test_a_socket_that_cannot_be_replaced_leaves_the_rescan() -> None:
    events = Hotplug(Connections(FakeMonitor(errno.ENOBUFS)))
    assert events.drain() == Changes(True, cpus=True)
    assert events.fileno() is None
    assert events.problem == "no hotplug events: Permission denied"
    assert events.drain() == Changes()


def test_no_netlink(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyudev

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(pyudev.Monitor, "from_netlink", refuse)
    events = Hotplug()
    assert events.fileno() is None
    assert events.problem == "no hotplug events: Address family not supported by protocol"
    assert events.drain() == Changes()


def test_no_pyudev(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyudev", cast(Any, None))
    events = Hotplug()
    assert events.fileno() is None
    assert events.problem is not None
    assert "install python3-pyudev" in events.problem


@pytest.mark.root
def test_events_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real socket: no machine but a board has devfreq, so it listens for network devices."""
    other = Hotplug()
    monkeypatch.setattr(hotplug, "DEVFREQ", "net")
    events = Hotplug()
    assert events.problem is None
    fd, other_fd = events.fileno(), other.fileno()
    assert fd is not None
    assert other_fd is not None
    assert events.drain() == Changes()
    Path("/sys/class/net/lo/uevent").write_text("change")
    assert select.select([fd], [], [], 10)[0]
    assert events.drain() == Changes(True)
    assert not select.select([fd], [], [], 0)[0]
    assert other.drain() == Changes()  # devfreq only
    assert not select.select([other_fd], [], [], 0)[0]


def test_a_processor_that_goes_offline_is_no_devfreq_event() -> None:
    events = Hotplug(Connections(FakeMonitor(Device("offline", "cpu3", "cpu"))))
    assert events.drain() == Changes(any=False, cpus=True)
    assert events.drain() == Changes()
