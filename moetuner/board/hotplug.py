"""Devfreq devices and processors that come and go, as a file descriptor to poll (pyudev).

Without it (no netlink, no libudev) nothing is lost but time: the daemon's rescan
finds the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from moetuner.errors import MissingRequirement, reason

DEVFREQ, CPU = "devfreq", "cpu"


class _Device(Protocol):
    @property
    def action(self) -> str | None: ...
    @property
    def sys_name(self) -> str: ...
    @property
    def subsystem(self) -> str | None: ...


class Monitor(Protocol):
    """What is used of pyudev.Monitor."""

    def fileno(self) -> int: ...
    def poll(self, timeout: float | None = None) -> _Device | None: ...


def connect() -> Monitor:
    """A started monitor of devfreq devices. MissingRequirement says why there is none."""
    try:
        import pyudev
    except ImportError as error:
        raise MissingRequirement(f"no hotplug events: {error}", "install python3-pyudev") from error
    try:
        # Straight from the kernel: sysfs is all we look at, so no rule of udev's has to
        # run first, and boards and containers without udevd have events too.
        monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source="kernel")
        monitor.filter_by(DEVFREQ)
        monitor.filter_by(CPU)
        monitor.start()
    except OSError as error:
        raise MissingRequirement(f"no hotplug events: {reason(error)}") from error
    return monitor  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Changes:
    """What happened since the last drain. `any` asks for a new look at the devfreq devices."""

    any: bool = False
    removed: frozenset[str] = frozenset()  # names, even of devices that are back
    cpus: bool = False  # a processor went on- or offline


class Hotplug:
    """Events of devfreq devices. `problem`: why there are none (None: there are)."""

    def __init__(self, connect: Callable[[], Monitor] = connect) -> None:
        self.problem: str | None = None
        self._connect = connect
        self._monitor: Monitor | None = None
        self._open()

    def fileno(self) -> int | None:
        """To poll for reading; None: rescan instead. May change with each drain."""
        return None if self._monitor is None else self._monitor.fileno()

    def drain(self) -> Changes:
        """Everything that is waiting; never blocks, never raises."""
        if self._monitor is None:
            return Changes()
        removed: set[str] = set()
        happened = cpus = False
        try:
            while (device := self._monitor.poll(0)) is not None:
                if device.subsystem == CPU:
                    cpus = True
                    continue
                happened = True
                if device.action in ("remove", "unbind"):
                    removed.add(device.sys_name)
        except OSError:
            # The socket's buffer ran over (ENOBUFS). pyudev never reads such a socket
            # again, which would make a poll loop spin: take a new one, and look anew.
            self._open()
            happened = cpus = True
        return Changes(happened, frozenset(removed), cpus)

    def _open(self) -> None:
        self._monitor = None
        try:
            self._monitor = self._connect()
            self.problem = None
        except MissingRequirement as error:
            self.problem = str(error)
