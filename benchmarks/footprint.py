"""What the daemon takes from the machine: memory, and processor time idle and at work.

- pss_mib, anon_mib: of the daemon once it has started (it has no child then);
- idle_wakeups_per_s: context switches of the idle daemon; cpu_seconds_per_hour_idle;
- cpu_percent_at_100: of one core while a process makes 100 calls a second, and the
  wake-ups per second then.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

from benchmarks import common
from benchmarks.common import Caller, Daemon, say
from moetuner.errors import MoetunerError

RATE_HZ = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/footprint", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="of each phase")
    options = parser.parse_args()
    with common.workspace() as directory:
        native = common.compile_native(directory)
        daemon = Daemon(directory, f"watch: {{libraries: [{native.watched}]}}\n")
        caller = Caller(native)
        try:
            daemon.start(native.watched)
            caller("call 1")
            time.sleep(5)  # the floor is back, and what the start left to do is done
            memory = _memory(daemon.pid)
            say(f"idle for {options.seconds} s")
            idle = _phase(daemon.pid, lambda: time.sleep(options.seconds))
            say(f"{RATE_HZ} calls a second for {options.seconds} s")
            busy = _phase(daemon.pid, lambda: caller(f"rate {options.seconds * RATE_HZ} {RATE_HZ}"))
        finally:
            caller.close()
            daemon.stop()
    common.report(
        "footprint",
        {
            **memory,
            "idle_wakeups_per_s": idle[1],
            "cpu_seconds_per_hour_idle": idle[0] * 3600,
            "cpu_percent_at_100": busy[0] * 100,
            "wakeups_per_s_at_100": busy[1],
        },
    )
    return 0


def _memory(pid: int) -> dict[str, float]:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()

    def mib(name: str) -> float:
        found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
        assert found, text
        return int(found[1]) / 1024

    return {"pss_mib": mib("Pss"), "anon_mib": mib("Anonymous")}


def _phase(pid: int, action: object) -> tuple[float, float]:
    """(processor seconds, wake-ups) per second of the daemon while `action` runs."""
    assert callable(action)
    before, started = _used(pid), time.monotonic()
    action()
    after, elapsed = _used(pid), time.monotonic() - started
    return (after[0] - before[0]) / elapsed, (after[1] - before[1]) / elapsed


def _used(pid: int) -> tuple[float, int]:
    # schedstat counts nanoseconds; utime in stat has ticks of 10 ms.
    nanoseconds = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    status = Path(f"/proc/{pid}/status").read_text()
    switches = sum(int(n) for n in re.findall(r"voluntary_ctxt_switches:\s+(\d+)", status))
    return nanoseconds / 1e9, switches


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MoetunerError as error:
        say(f"footprint: {error}")
        sys.exit(error.exit_code)
