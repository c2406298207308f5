"""Compiles the probe with bcc and hands its programs and maps over; then it ends.

    python3 -m moetuner.watch.loader SOCKET_FD PROBE_DIR

bcc carries a compiler that keeps 100 MB resident; on an 8 GB board that memory is
for experts. So this helper loads everything into the kernel, sends the descriptors
through the socket (SCM_RIGHTS) and exits: the programs live as long as the daemon
holds the descriptors.

One JSON message goes over the socket: `{"ok": true, "names": [...], "headers": "…"}`
with one descriptor for each name, or `{"ok": false, "message": …, "hint": …,
"code": exit code}`. This is the only module that imports bcc.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moetuner.errors import MissingRequirement, MoetunerError, SystemRefused
from moetuner.watch import headers, layout

BCC_HINT = "apt-get install python3-bpfcc"


@contextlib.contextmanager
def _captured_stderr() -> Iterator[list[str]]:
    """bcc's compiler and verifier write to descriptor 2; keep it for the explanation."""
    lines: list[str] = []
    with os.fdopen(os.memfd_create("stderr"), "r+b") as file:  # needs no writable directory
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            lines.extend(file.read(1 << 20).decode("utf-8", "replace").splitlines())


def compile_probe(probe_dir: Path, source: headers.Headers) -> tuple[list[str], list[int], Any]:
    """Names, descriptors (owned by the third value) of all programs and maps."""
    try:
        import bcc
    except (ImportError, OSError) as error:  # OSError: without its library
        raise MissingRequirement(f"bcc is not installed: {error}", BCC_HINT) from error

    # Kernels before 5.11 charge maps to RLIMIT_MEMLOCK.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY,) * 2)
    text = (probe_dir / "inference.bpf.c").read_text()
    with _captured_stderr() as stderr:
        try:
            module = bcc.BPF(text=text, cflags=[f"-I{probe_dir}"])
            names: list[str] = []
            fds: list[int] = []
            for name in layout.UPROBE_PROGRAMS:
                names.append(name)
                fds.append(module.load_func(name, bcc.BPF.KPROBE).fd)
            for name in layout.TRACEPOINT_PROGRAMS:
                names.append(name)
                fds.append(module.load_func(name, bcc.BPF.RAW_TRACEPOINT).fd)
            for name in layout.MAPS:
                names.append(name)
                fds.append(module[name.encode()].map_fd)
        except Exception as error:  # bcc raises bare Exception; every kind is explained
            failure: BaseException | None = error
        else:
            failure = None
    if failure is not None:
        raise explain(failure, stderr, source) from failure
    return names, fds, module


def explain(error: BaseException, stderr: list[str], source: headers.Headers) -> MoetunerError:
    """What bcc's failure means for the user. `stderr`: what the compiler printed."""
    text = "\n".join([str(error), *stderr])
    tail = " | ".join(line for line in stderr[-3:] if line.strip())
    if re.search(r"^processed \d+ insns", text, re.MULTILINE):
        # The verifier refuses with "Permission denied" too, and then prints its log.
        return SystemRefused(f"this kernel's verifier refuses the probe: {error} [{tail}]")
    if "Operation not permitted" in text or "Permission denied" in text:
        if os.geteuid() != 0:
            return MissingRequirement("eBPF needs root", "run with sudo")
        return MissingRequirement(
            "the kernel refuses eBPF programs to this process",
            "CAP_SYS_ADMIN is needed; a container or kernel lockdown takes it away",
        )
    if "Function not implemented" in text:
        return MissingRequirement("this kernel has no eBPF", "CONFIG_BPF_SYSCALL is needed")
    detail = next((line for line in stderr if "error:" in line), "")
    if "kernel headers" in text or "file not found" in text or "No such file" in text:
        return MissingRequirement(
            f"bcc cannot use kernel headers ({source.describe()})"
            + (f": {detail}" if detail else ""),
            headers.HINT,
        )
    return SystemRefused(
        f"the probe does not load: {detail or error}" + (f" [{tail}]" if tail else "")
    )


def main(arguments: list[str]) -> int:
    with socket.socket(fileno=int(arguments[0])) as channel:
        message: dict[str, object]
        fds: list[int] = []
        module: Any = None
        try:
            source = headers.find()
            with tempfile.TemporaryDirectory(prefix="moetuner-headers-") as scratch:
                tree = source.directory
                if source.common:
                    tree = headers.merged(source, Path(scratch) / "tree")
                if tree:
                    os.environ["BCC_KERNEL_SOURCE"] = str(tree)
                names, fds, module = compile_probe(Path(arguments[1]), source)
            message = {"ok": True, "names": names, "headers": source.describe()}
        except MoetunerError as error:
            message = {
                "ok": False,
                "message": error.message,
                "hint": error.hint,
                "code": error.exit_code,
            }
        except Exception as error:  # no traceback: the daemon is told, in one line
            text = f"the probe's compiler failed: {type(error).__name__}: {error}"
            message = {"ok": False, "message": text[:1000], "hint": None, "code": 4}
        socket.send_fds(channel, [json.dumps(message).encode()], fds)
    # Not through interpreter exit: bcc's cleanup there detaches through tracefs and
    # prints a traceback where it is not mounted. Nothing is attached here.
    sys.stdout.flush()
    _ = module  # owns the descriptors until they are sent
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
