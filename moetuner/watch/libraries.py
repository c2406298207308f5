"""The files that hold llama.cpp and the probes in them.

A file is known by (device, inode), see `identify`, and attached once, whatever its name
and in whatever mount namespace it was seen. Life of one:

    offered → examining (elf, then the inspector in its own process) → attached → forgotten

Probes at old offsets would corrupt new code, so a file that is written in place is
detached at the first write (inotify), or once it is as long again (`_reaches`), and
examined again when its writer closes it. A file that was deleted, or that lies in another
mount namespace, is let go once no process maps it.

Owner of all fields: the daemon's only thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import selectors
import stat
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from moetuner.errors import reason
from moetuner.inotify import IN_CLOSE_WRITE, IN_MODIFY, Inotify
from moetuner.log import NOTICE, WARNING, Log, printable
from moetuner.watch import elf, kernel, layout
from moetuner.watch.closer import Closer
from moetuner.watch.inspections import Inspections
from moetuner.watch.places import Places
from moetuner.watch.program import Program

Identity = tuple[int, int]
_OVERFLOW = -1  # in place of a watch: inotify lost events
_PAGE = os.sysconf("SC_PAGE_SIZE")
_REJECTED_LIMIT = 16384  # files remembered as none of ours until they change


@dataclass
class Library:
    """One file. `fd` keeps the very inode; `path` is a name for people."""

    identity: Identity
    path: str
    fd: int
    stamp: tuple[int, int]  # size, mtime in ns: what was examined
    foreign: bool  # not to be found under its path in our own mount namespace
    state: str = "examining"  # examining | attached | failed | changing
    functions: tuple[str, ...] = ()
    returns: str = ""  # sites | uretprobe
    why: str = ""
    links: list[int] = field(default_factory=list)
    highest: int = 0  # offset of any probe
    detaching: int = 0  # sets of links that are being closed
    next: Places | None = None  # to attach at when no link is left
    watch: int | None = None
    pids: set[int] = field(default_factory=set)

    @property
    def handle(self) -> str:
        """A path to exactly this inode, short whatever the file's own path is."""
        return f"/proc/self/fd/{self.fd}"


class Libraries:
    """`on_change` is called after each change that status should show."""

    def __init__(
        self,
        program: Program,
        pmu: kernel.UprobePmu,
        selector: selectors.BaseSelector,
        returns: str,
        log: Log,
        on_change: Callable[[], None],
    ) -> None:
        self._program = program
        self._pmu = pmu
        self._selector = selector
        self._returns = returns
        self._log = log
        self._on_change = on_change
        self._machine = platform.machine()
        self.known: dict[Identity, Library] = {}
        self._rejected: dict[Identity, tuple[int, int]] = {}
        self._inspections = Inspections(selector)
        self._closer = Closer(selector)
        self._inotify = Inotify()
        selector.register(self._inotify.fileno(), selectors.EVENT_READ, self._written)

    def set_returns(self, returns: str) -> None:
        """How returns are probed from now on; files that are attached are attached anew."""
        if returns == self._returns:
            return
        self._returns = returns
        for library in list(self.known.values()):
            if library.state in ("attached", "failed"):
                self._detach(library, f"watch.returns is now {returns}")
                self._inspect(library)

    def offer(self, opener: str | Path, path: str, pid: int | None = None) -> Identity | None:
        """Considers a file: `opener` opens it now, `path` names it. None if it is none of ours."""
        try:
            # Opening a device may do something: a look first.
            if not stat.S_ISREG(os.stat(opener).st_mode):
                return None
            fd = os.open(opener, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        except (OSError, ValueError):
            return None
        try:
            status = os.fstat(fd)
            identity = identify(fd, status)
            stamp = (status.st_size, status.st_mtime_ns)
            library = self.known.get(identity)
            if library is None:
                if not stat.S_ISREG(status.st_mode) or self._rejected.get(identity) == stamp:
                    return None
                if not elf.may_export(fd, self._machine):
                    self._reject(identity, stamp)
                    return None
                foreign = not _is_at(path, status)
                library = Library(identity, printable(path, 400), fd, stamp, foreign)
                fd = -1  # the library's now
                self.known[identity] = library
                with contextlib.suppress(OSError):  # without: the rescan compares stamps
                    library.watch = self._inotify.add(library.handle, IN_MODIFY | IN_CLOSE_WRITE)
                self._inspect(library)
            elif library.stamp != stamp and library.state != "changing":
                self._detach(library, "it was changed in place")
                self._inspect(library)
            if pid is not None:
                library.pids.add(pid)
            return identity
        finally:
            if fd >= 0:
                os.close(fd)

    def _reject(self, identity: Identity, stamp: tuple[int, int]) -> None:
        if len(self._rejected) >= _REJECTED_LIMIT:
            self._rejected.clear()
        self._rejected[identity] = stamp

    def _inspect(self, library: Library) -> None:
        library.stamp = _stamp(library.fd)
        library.state = "examining"
        self._inspections.start(
            library.identity, library.fd, lambda answer: self._inspected(library, answer)
        )

    def _inspected(self, library: Library, answer: bytes) -> None:
        try:
            parsed = json.loads(answer) if answer else None
            places = Places.parse(parsed, library.stamp[0])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._fail(library, f"cannot be examined: {printable(str(error))}")
            return
        if not places.functions and library.links:
            self._fail(library, "it was overwritten with something else")
            return
        if not places.functions:  # it only calls them
            self._reject(library.identity, library.stamp)
            self._forget(library)
            return
        self._attach_after_detaching(library, places)

    def _attach_after_detaching(self, library: Library, places: Places) -> None:
        if library.detaching or library.links:
            library.next = places
        else:
            self._attach(library, places)

    def _attach(self, library: Library, places: Places) -> None:
        library.functions = tuple(n for n in layout.FUNCTIONS if n in places.functions)
        if self._returns == "sites" and places.unclear is not None:
            self._fail(library, f"watch.returns is sites, but {places.unclear}")
            return
        use_sites = self._returns != "uretprobe" and places.unclear is None
        library.returns = "sites" if use_sites else "uretprobe"
        library.why = "" if use_sites else places.unclear or "watch.returns is uretprobe"
        try:
            # Returns first: a call that entered between the two would never be seen to
            # end. A return without its entry is only counted.
            if use_sites:
                for site in places.sites:
                    self._link(library, site, "leave_site", on_return=False)
            else:
                for name in library.functions:
                    program = layout.LEAVE[layout.FUNCTIONS.index(name)]
                    self._link(library, places.functions[name], program, on_return=True)
            for name in library.functions:
                program = layout.ENTER[layout.FUNCTIONS.index(name)]
                # With a uretprobe both share the trap of the function's first byte.
                offset = (places.entries if use_sites else places.functions)[name]
                self._link(library, offset, program, on_return=False)
        except OSError as error:
            self._unlink(library)  # all or nothing
            why = f"cannot attach probes: {reason(error)}"
            if use_sites and self._returns == "auto":
                # An instruction that this kernel cannot probe, or a limit that it has.
                self._attach_after_detaching(library, replace(places, unclear=why))
            else:
                self._fail(library, why)
            return
        library.state = "attached"
        how = "" if use_sites else f"; returns by uretprobe: {printable(library.why)}"
        self._log(f"watching {library.path} ({', '.join(library.functions)}{how})", NOTICE)
        self._on_change()

    def _link(self, library: Library, offset: int, program: str, *, on_return: bool) -> None:
        fd = self._program.fds[program]
        library.links.append(self._pmu.attach(library.handle, offset, fd, on_return=on_return))
        library.highest = max(library.highest, offset)

    def _unlink(self, library: Library) -> None:
        links, library.links = library.links[::-1], []  # entries first, then returns
        if links:
            library.detaching += 1
            self._closer.close_all(links, lambda: self._unlinked(library))

    def _unlinked(self, library: Library) -> None:
        library.detaching -= 1
        library.highest = 0
        places, library.next = library.next, None
        if places is not None:
            self._attach_after_detaching(library, places)

    def _fail(self, library: Library, why: str) -> None:
        library.state, library.why = "failed", why
        self._log(f"not watching {library.path}: {why}", WARNING)
        self._on_change()

    def _detach(self, library: Library, why: str) -> None:
        if library.links:
            self._log(f"no longer watching {library.path}: {why}", NOTICE)
        library.next = None
        self._inspections.cancel(library.identity)
        if _reaches(library):
            self._unlink(library)
        self._on_change()

    def _forget(self, library: Library) -> None:
        library.next = None
        self._unlink(library)
        self._inspections.cancel(library.identity)
        if library.watch is not None:
            self._inotify.remove(library.watch)
        self.known.pop(library.identity, None)
        os.close(library.fd)

    def _written(self) -> None:
        masks: dict[int, int] = {}
        for watch, mask in self._inotify.read():
            masks[watch] = masks.get(watch, 0) | mask
        for library in list(self.known.values()):
            mask = masks.get(library.watch, 0) if library.watch is not None else 0
            # After an overflow anything may have been written, or closed.
            mask |= IN_CLOSE_WRITE if _OVERFLOW in masks else 0
            if mask & IN_MODIFY and library.state != "changing":
                self._detach(library, "it is being written to")
                library.state = "changing"
            elif library.links and library.state == "changing" and _reaches(library):
                self._unlink(library)
            if mask & IN_CLOSE_WRITE and library.state == "changing":
                self._inspect(library)
            elif mask & IN_CLOSE_WRITE and library.stamp != _stamp(library.fd):
                # Through a shared mapping (linkers do), which shows no write.
                self._detach(library, "it was written to")
                self._inspect(library)

    def retire(self, mapped: dict[Identity, set[int]]) -> bool:
        """Given who maps what now: lets go of files that are deleted or foreign and unused.

        True if there were any: they count as new when they are mapped again.
        """
        retired = False
        for library in list(self.known.values()):
            library.pids = mapped.get(library.identity, set())
            if library.state == "changing":
                # truncate(2) has no close: two scans without a write are as good.
                before, library.stamp = library.stamp, _stamp(library.fd)
                if before == library.stamp:
                    self._inspect(library)
            if library.pids or library.identity in self._inspections:
                continue
            if library.state != "attached":
                self._unlink(library)  # what `_reaches` left
            deleted = os.fstat(library.fd).st_nlink == 0
            if deleted or library.foreign:
                self._detach(
                    library,
                    ("it was deleted and " if deleted else "") + "no process maps it any more",
                )
                self._forget(library)
                retired = True
        return retired

    def close(self) -> None:
        self._inspections.close()
        for library in list(self.known.values()):
            self._forget(library)
        self._closer.close()
        self._selector.unregister(self._inotify.fileno())
        self._inotify.close()


def _reaches(library: Library) -> bool:
    """Whether the file is long enough for its probes to be removed.

    The kernel cannot restore a page that a process maps and that the file, cut short, has
    no more. It then keeps the probe with its copy of the instruction, and runs that when a
    probe is set there again: in the new code, or in another file whose inode comes to lie
    at the same address. Programs crash (seen on 6.18).
    """
    return os.fstat(library.fd).st_size > library.highest - library.highest % _PAGE


def _stamp(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return (status.st_size, status.st_mtime_ns)


def identify(fd: int, status: os.stat_result) -> Identity:
    """The file's identity, for the kernel's probes too.

    Containers of one image share the files of its layers, though each has a device number
    of its own for them: probes attached through both would count each call twice. On an
    overlay the change time stands for the device.
    """
    if kernel.is_overlay(fd):
        return (-status.st_ctime_ns, status.st_ino)
    return (status.st_dev, status.st_ino)


def _is_at(path: str, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), status)
    except (OSError, ValueError):
        return False
