"""From the first call after idle to min_freq written: the daemon, a poller, bpftrace.

Each round makes one transition for each of the three, one after another, so that all
meet the same machine. The caller takes the time just before it calls and then reads
the file over and over until the new value is there: its resolution is a few µs.

- daemon: the real one, with everything it does (judging, saved baseline, fsync, write).
- poller: looks at a counter that the caller raises, every 100 ms, and writes.
- bpftrace: prints on entry; a Python program reads its pipe, and writes.

- busy: the daemon alone again, while a spinning process for each core competes with it,
  as llama.cpp's compute threads do.

Figures: p50 and p99 of each in milliseconds, and the number of transitions.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import common
from benchmarks.common import Caller, Daemon, say
from moetuner.demo.board import FREQUENCIES
from moetuner.errors import MissingRequirement, MoetunerError

HOLD_S = 0.1  # the shortest that can be configured: 500 transitions in two minutes
POLL_S = 0.1
IDLE = str(FREQUENCIES[0])

# Both writers put the value into the file that the caller reads.
POLLER = """
import os, sys, time
counter, target, value = sys.argv[1:4]
seen = os.stat(counter).st_size
while True:
    time.sleep(float(sys.argv[4]))
    size = os.stat(counter).st_size
    if size != seen:
        seen = size
        with open(target, "w") as file:
            file.write(value)
"""
READER = """
import sys
for line in sys.stdin:
    if line.startswith("call"):
        with open(sys.argv[1], "w") as file:
            file.write(sys.argv[2])
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/floor_latency", description=__doc__)
    parser.add_argument("--transitions", type=int, default=500)
    options = parser.parse_args()
    with common.workspace() as directory:
        native = common.compile_native(directory)
        daemon = Daemon(
            directory,
            f"floor: {{hold: {HOLD_S}}}\nwatch: {{libraries: [{native.watched}]}}\n",
        )
        poller_file, counter = directory / "poller", directory / "counter"
        bpftrace_file = directory / "bpftrace"
        for path in (poller_file, counter, bpftrace_file):
            path.write_text(IDLE)
        caller, plain = Caller(native), Caller(native, watched=False)
        poller = subprocess.Popen(
            [
                sys.executable,
                "-c",
                POLLER,
                str(counter),
                str(poller_file),
                common.RAISED,
                str(POLL_S),
            ]
        )
        tracer, reader = _bpftrace(native.plain, bpftrace_file)
        spinners: list[subprocess.Popen[bytes]] = []
        try:
            daemon.start(native.watched)
            caller("call 1")  # the process is judged once, before anything is measured
            times: dict[str, list[float]] = {"daemon": [], "poller": [], "bpftrace": []}
            command = f"until {daemon.board.min_freq} {common.RAISED}"
            for done in range(options.transitions):
                common.wait_for(daemon.board.min_freq, IDLE)
                time.sleep(HOLD_S)
                times["daemon"].append(caller(command))
                bpftrace_file.write_text(IDLE)
                times["bpftrace"].append(plain(f"until {bpftrace_file} {common.RAISED}"))
                poller_file.write_text(IDLE)
                with counter.open("a") as file:
                    file.write("x")
                started = time.monotonic()
                common.wait_for(poller_file, common.RAISED)
                times["poller"].append(time.monotonic() - started)
                if (done + 1) % 50 == 0:
                    say(f"{done + 1} of {options.transitions} transitions")
            say("the daemon alone, with all cores busy")
            spinners = [
                subprocess.Popen([sys.executable, "-c", "while True: pass"])
                for _ in range(os.cpu_count() or 1)
            ]
            times["busy"] = []
            for _ in range(max(1, options.transitions // 5)):
                common.wait_for(daemon.board.min_freq, IDLE)
                time.sleep(HOLD_S)
                times["busy"].append(caller(command))
        finally:
            for process in (tracer, reader, poller, *spinners):
                process.kill()
                process.wait()
            caller.close()
            plain.close()
            daemon.stop()
    figures = {"transitions": float(options.transitions)}
    for name, values in times.items():
        prefix = "" if name == "daemon" else f"{name}_"
        figures[f"{prefix}p50_ms"] = common.percentile(values, 50) * 1e3
        figures[f"{prefix}p99_ms"] = common.percentile(values, 99) * 1e3
    common.report("floor_latency", figures)
    return 0


def _bpftrace(
    library: Path, target: Path
) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    script = f'uprobe:{library}:plain_decode {{ printf("call %d\\n", pid); }}'
    try:
        tracer = subprocess.Popen(
            ["bpftrace", "-B", "none", "-e", f'BEGIN {{ printf("ready\\n"); }} {script}'],
            stdout=subprocess.PIPE,
        )
    except FileNotFoundError:
        raise MissingRequirement("bpftrace is not installed", "apt-get install bpftrace") from None
    reader = subprocess.Popen(
        [sys.executable, "-u", "-c", READER, str(target), common.RAISED], stdin=tracer.stdout
    )
    time.sleep(5)  # bpftrace says nothing when it has attached; it took 1 s here
    if tracer.poll() is not None:
        raise MissingRequirement("bpftrace does not run here", "see its message above")
    return tracer, reader


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MoetunerError as error:
        say(f"floor_latency: {error}")
        sys.exit(error.exit_code)
