"""The loaded probe: descriptors of its programs, and its maps."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moetuner.errors import MissingRequirement, MoetunerError, SystemRefused
from moetuner.watch import helper, layout
from moetuner.watch.bpf import LibBpf, Map, RingBuffer

PROBE_DIR = helper.PACKAGE_PARENT / "probes"
INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, fixed in the kernel
# bcc took 0.7 s here, 14 s under software emulation; a board in its slowest mode lies between.
LOAD_TIMEOUT_S = 120


class Program:
    """`fds`: program name → descriptor. Maps by their name in probes/inference.h."""

    def __init__(self, library: LibBpf, fds: dict[str, int], headers: str) -> None:
        self.library = library
        self.fds = fds
        self.headers = headers
        self.threads = Map(library, fds["threads"], ctypes.c_uint64)
        self.processes = Map(library, fds["processes"], ctypes.c_uint32)
        self.verdicts = Map(library, fds["verdicts"], ctypes.c_uint32)
        self._settings = Map(library, fds["settings"], ctypes.c_uint32)
        self._counters = Map(library, fds["counters"], ctypes.c_uint32)
        self._links = [
            library.attach_raw_tracepoint(tracepoint, fds[name])
            for name, tracepoint in layout.TRACEPOINT_PROGRAMS.items()
        ]

    def ring_buffer(self, handle: Callable[[layout.Event], None]) -> RingBuffer:
        return RingBuffer(self.library, self.fds["events"], handle)

    def set_rearm(self, seconds: float) -> None:
        """Silence after which a process's next call wakes user space."""
        self._settings.update(layout.SETTING_REARM_NS, ctypes.c_uint64(round(seconds * 1e9)))

    def counter(self, index: int) -> int:
        value = ctypes.c_uint64()
        self._counters.lookup(index, value)
        return value.value

    def close(self) -> None:
        for fd in [*self._links, *self.fds.values()]:
            os.close(fd)
        self._links.clear()
        self.fds.clear()


def load(probe_dir: Path = PROBE_DIR) -> Program:
    """Compiles and loads the probe in a helper process (loader.py).

    Raises MissingRequirement (not root, no eBPF, no headers, no bcc, a pid namespace) or
    SystemRefused, with what to do; never bcc's own errors.
    """
    namespace = os.readlink("/proc/self/ns/pid")
    if namespace != INITIAL_PID_NAMESPACE:
        raise MissingRequirement(
            "running inside a pid namespace (a container): the kernel reports other pids there",
            "run it on the host, or with the host's pid namespace (docker: --pid=host)",
        )
    if not (probe_dir / "inference.bpf.c").is_file():
        raise MissingRequirement(
            f"{probe_dir}/inference.bpf.c is missing", "install moetuner again"
        )
    library = LibBpf()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        process = subprocess.Popen(
            helper.command(
                "moetuner.watch.loader", str(theirs.fileno()), str(probe_dir.absolute())
            ),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            **helper.surroundings(),
        )
        theirs.close()
        ours.settimeout(LOAD_TIMEOUT_S)
        try:
            data, fds, _, _ = socket.recv_fds(ours, 65536, 64, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            data, fds = b"", []
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            if process.poll() is None:
                process.kill()
                process.wait()
    return _received(library, data, fds, process.returncode)


def _received(library: LibBpf, data: bytes, fds: list[int], status: int) -> Program:
    if not data:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        raise SystemRefused(
            f"the probe's compiler ended without an answer ({how})",
            "is memory short? it needs 150 MB for a second",
        )
    message: dict[str, Any] = json.loads(data)
    if not message["ok"]:
        kind = MissingRequirement if message["code"] == 3 else SystemRefused
        error: MoetunerError = kind(message["message"], message["hint"])
        raise error
    names = message["names"]
    if len(fds) != len(names):  # the kernel drops those that do not fit
        for fd in fds:
            os.close(fd)
        raise SystemRefused(
            f"only {len(fds)} of {len(names)} descriptors of the probe could be received",
            "raise the limit of open files (ulimit -n, LimitNOFILE=)",
        )
    return Program(library, dict(zip(names, fds, strict=True)), message["headers"])
