"""A simulated Orin Nano Super: the directory tree that the daemon is given as its root.

    python3 -m moetuner.demo.board DIR        create it and play its governor

The files are plain files, so values are not clamped or refused as the kernel does
it; the governor only lets cur_freq and the board's power follow the floor.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from moetuner.demo.writes import Writes
from moetuner.errors import MoetunerError

NODE = "17000000.gpu"
DEVICE = "sys/devices/platform/bus@0/17000000.gpu"
FREQUENCIES_MHZ = (306, 408, 510, 612, 714, 816, 918, 1020)
FREQUENCIES = tuple(mhz * 1_000_000 for mhz in FREQUENCIES_MHZ)
MODEL = "NVIDIA Jetson Orin Nano Developer Kit Super"
COMPATIBLE = "nvidia,p3768-0000+p3767-0005-super\0nvidia,tegra234\0"
RELEASE = (
    "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, "
    "DATE: Wed Jan  8 01:49:37 UTC 2025"
)
# Board power while decoding with experts on the CPU, measured: 8.05 W at 306 MHz, 9.63 W at 1020.
IDLE_MW, RAISED_MW = 8050, 9630
SUPPLY_MV = 5000
ZONES = (("cpu-thermal", 51_000), ("gpu-thermal", 49_500), ("soc0-thermal", 50_250))
PASSIVE_MC = 99_000  # millidegrees at which the board throttles


@dataclass(frozen=True)
class Board:
    """Where things are in the tree; all paths exist after `create`."""

    root: Path

    @property
    def node(self) -> Path:
        return self.root / DEVICE / "devfreq" / NODE

    @property
    def min_freq(self) -> Path:
        return self.node / "min_freq"

    @property
    def max_freq(self) -> Path:
        return self.node / "max_freq"

    @property
    def cur_freq(self) -> Path:
        return self.node / "cur_freq"

    @property
    def power(self) -> Path:
        """hwmon directory of the INA3221."""
        return self.root / "sys/devices/platform/bus@0/c240000.i2c/i2c-1/1-0040/hwmon/hwmon1"

    @property
    def state(self) -> Path:
        return self.root / "run/moetuner"

    def floor(self) -> int:
        """min_freq in Hz; the last complete value while it is being written."""
        return _number(self.min_freq, FREQUENCIES[0])

    def lowest(self) -> int:
        """The lowest supported frequency in Hz: min_freq of an idle board."""
        return FREQUENCIES[0]


def _number(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default


def create(root: Path) -> Board:
    """Writes the tree below `root` (made if missing) as the board is after boot, idle."""
    board = Board(root)
    node, power = board.node, board.power
    files: dict[Path, str] = {
        node / "available_frequencies": " ".join(map(str, FREQUENCIES)),
        node / "min_freq": str(FREQUENCIES[0]),
        node / "max_freq": str(FREQUENCIES[-1]),
        node / "cur_freq": str(FREQUENCIES[0]),
        node / "target_freq": str(FREQUENCIES[0]),
        node / "governor": "nvhost_podgov",
        node / "available_governors": "nvhost_podgov userspace performance powersave",
        node / "polling_interval": "25",
        root / DEVICE / "of_node/name": "gpu\0",
        root / DEVICE / "of_node/compatible": "nvidia,ga10b\0",
        root / DEVICE / "load": "0",
        power / "name": "ina3221",
        power / "in1_label": "VDD_IN",
        power / "in1_input": str(SUPPLY_MV),
        power / "curr1_input": str(IDLE_MW * 1000 // SUPPLY_MV),
        root / "etc/nv_tegra_release": RELEASE,
        root / "proc/device-tree/model": MODEL + "\0",
        root / "proc/device-tree/compatible": COMPATIBLE,
    }
    for number, (name, temperature) in enumerate(ZONES):
        zone = root / f"sys/devices/virtual/thermal/thermal_zone{number}"
        files[zone / "type"] = name
        files[zone / "temp"] = str(temperature)
        files[zone / "trip_point_0_type"] = "passive"
        files[zone / "trip_point_0_temp"] = str(PASSIVE_MC)
    cooling = root / "sys/devices/virtual/thermal/cooling_device0"
    files |= {cooling / "type": f"devfreq-{NODE}", cooling / "cur_state": "0"}
    files[cooling / "max_state"] = str(len(FREQUENCIES) - 1)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if text.endswith("\0") else text + "\n")
    (root / "run").mkdir(exist_ok=True)
    _link(root / "sys/class/devfreq" / NODE, node)
    _link(node / "device", root / DEVICE)
    _link(root / "sys/class/hwmon/hwmon1", power)
    for directory in sorted((root / "sys/devices/virtual/thermal").iterdir()):
        _link(root / "sys/class/thermal" / directory.name, directory)
    return board


def _link(path: Path, target: Path) -> None:
    """A relative link, as in sysfs, so that the tree can be moved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


def clock(floor: int, ceiling: int) -> int:
    """cur_freq in Hz at low load: the lowest supported frequency within the limits.

    As in devfreq, the ceiling wins over the floor, and 0 means no ceiling.
    """
    allowed = [f for f in FREQUENCIES if f <= (ceiling or FREQUENCIES[-1])] or [FREQUENCIES[0]]
    return min((f for f in allowed if f >= floor), default=allowed[-1])


def power_mw(frequency: int) -> int:
    """Board power at that GPU clock, linear between the two measured points."""
    share = (frequency - FREQUENCIES[0]) / (FREQUENCIES[-1] - FREQUENCIES[0])
    return round(IDLE_MW + share * (RAISED_MW - IDLE_MW))


def follow(board: Board) -> None:
    """Applies min_freq and max_freq once, as the governor would."""
    frequency = clock(board.floor(), _number(board.max_freq, FREQUENCIES[-1]))
    for name in ("cur_freq", "target_freq"):
        (board.node / name).write_text(f"{frequency}\n")
    (board.power / "curr1_input").write_text(f"{power_mw(frequency) * 1000 // SUPPLY_MV}\n")


def govern(board: Board) -> None:
    """Plays the governor until it is ended by a signal. Sleeps until a limit is written."""
    limits = Writes()
    try:
        limits.watch(board.min_freq)
        limits.watch(board.max_freq)
        follow(board)
        while True:
            limits.wait()
            follow(board)
    finally:
        limits.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m moetuner.demo.board",
        description="Create a simulated Orin Nano board and play its governor until Ctrl-C.",
        epilog="Example: python3 -m moetuner.demo.board /tmp/board",
    )
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument(
        "--existing", action="store_true", help="leave the tree as it is, play the governor only"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        govern(Board(options.directory) if options.existing else create(options.directory))
    except MoetunerError as error:
        print(f"moetuner: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"moetuner: {options.directory}: {error}", file=sys.stderr)
        return 4
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
