"""Maps, the ring buffer and raw tracepoints through libbpf.

libbpf is small (0.4 MB) and comes with bcc, whose own library holds a compiler: the
daemon uses this one and lets the compiler go (see loader.py). Its ring buffer reader
has the memory barriers that Arm needs. The functions used have kept their signatures
from libbpf 0.3 to 1.x.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator

from moetuner.errors import MissingRequirement, SystemRefused
from moetuner.watch.layout import Event

_SAMPLE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_PRINT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
BPF_ANY = 0


class LibBpf:
    """The shared library with the signatures that are called."""

    NAMES = ("libbpf.so.1", "libbpf.so.0")

    def __init__(self) -> None:
        for name in self.NAMES:
            try:
                self.lib = ctypes.CDLL(name, use_errno=True)
                break
            except OSError:
                continue
        else:
            raise MissingRequirement(
                "libbpf is not installed", "apt-get install libbpf1 (Ubuntu 22.04: libbpf0)"
            )
        lib = self.lib
        lib.ring_buffer__new.restype = ctypes.c_void_p
        lib.ring_buffer__new.argtypes = [ctypes.c_int, _SAMPLE, ctypes.c_void_p, ctypes.c_void_p]
        lib.ring_buffer__consume.argtypes = [ctypes.c_void_p]
        lib.ring_buffer__free.argtypes = [ctypes.c_void_p]
        lib.ring_buffer__free.restype = None
        # libbpf prints warnings to stderr by itself; what matters comes back as errors.
        lib.libbpf_set_print.argtypes = [ctypes.c_void_p]
        lib.libbpf_set_print.restype = ctypes.c_void_p
        lib.libbpf_set_print(None)

    def attach_raw_tracepoint(self, name: str, program_fd: int) -> int:
        """A link's descriptor: closing it detaches. SystemRefused if the kernel refuses."""
        fd = self.lib.bpf_raw_tracepoint_open(name.encode(), program_fd)
        if fd < 0:
            raise SystemRefused(
                f"cannot attach to the raw tracepoint {name}: {os.strerror(_code(fd))}"
            )
        return int(fd)


def _code(result: int) -> int:
    """libbpf 1.x returns -errno, 0.x returns -1 and sets errno."""
    return -result if result < -1 else ctypes.get_errno() or 1


class Map:
    """A BPF map with fixed key and value types (little-endian integers or ctypes structs)."""

    def __init__(self, library: LibBpf, fd: int, key: type[ctypes._SimpleCData[int]]) -> None:
        self._lib = library.lib
        self.fd = fd
        self._key = key

    def lookup(self, key: int, value: ctypes.Structure | ctypes._SimpleCData[int]) -> bool:
        """Reads into `value`; False if the key is not there."""
        result: int = self._lib.bpf_map_lookup_elem(
            self.fd, ctypes.byref(self._key(key)), ctypes.byref(value)
        )
        return result == 0

    def update(self, key: int, value: ctypes.Structure | ctypes._SimpleCData[int]) -> None:
        result = self._lib.bpf_map_update_elem(
            self.fd,
            ctypes.byref(self._key(key)),
            ctypes.byref(value),
            ctypes.c_uint64(BPF_ANY),
        )
        if result != 0:
            raise SystemRefused(f"cannot write to a BPF map: {os.strerror(_code(result))}")

    def delete(self, key: int) -> None:
        self._lib.bpf_map_delete_elem(self.fd, ctypes.byref(self._key(key)))

    def keys(self) -> Iterator[int]:
        """Keys present now, each at most about once: the map may change meanwhile.

        At most 65,536 steps: a concurrent delete makes the kernel start over.
        """
        following = self._key()
        current: ctypes._SimpleCData[int] | None = None
        for _ in range(65536):
            given = ctypes.byref(current) if current is not None else None
            if self._lib.bpf_map_get_next_key(self.fd, given, ctypes.byref(following)) != 0:
                return
            yield following.value
            current = self._key(following.value)


class RingBuffer:
    """The transition records. `fileno` is readable when there are some."""

    def __init__(self, library: LibBpf, fd: int, handle: Callable[[Event], None]) -> None:
        self._lib = library.lib
        self._fd = fd
        self._handle = handle
        self._error: BaseException | None = None
        self._callback = _SAMPLE(self._sample)  # must live as long as the buffer
        self._buffer = self._lib.ring_buffer__new(fd, self._callback, None, None)
        if not self._buffer:
            raise SystemRefused(
                f"cannot map the BPF ring buffer: {os.strerror(ctypes.get_errno())}",
                "kernel 5.8 or newer is needed",
            )

    def fileno(self) -> int:
        return self._fd

    def _sample(self, _context: int, data: int, size: int) -> int:
        if size >= ctypes.sizeof(Event):
            # A copy: the kernel may reuse the memory once this function returns.
            try:
                self._handle(Event.from_buffer_copy(ctypes.string_at(data, ctypes.sizeof(Event))))
            except BaseException as error:  # ctypes would print and swallow it
                self._error = error
        return 0

    def consume(self) -> None:
        """Calls `handle` for each record there is; does not block."""
        self._lib.ring_buffer__consume(self._buffer)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        if self._buffer:
            self._lib.ring_buffer__free(self._buffer)
            self._buffer = None
