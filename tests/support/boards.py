"""Fake boards, one per kind of Jetson: the files of /sys, /proc and /etc that matter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MHZ = 1_000_000


@dataclass(frozen=True)
class Link:
    """A symbolic link, relative as in sysfs."""

    target: str


Files = dict[str, str | Link]  # absolute path → content


@dataclass(frozen=True)
class Node:
    """One device below /sys/class/devfreq."""

    name: str
    frequencies: tuple[int, ...]  # Hz, ascending
    of_name: str | None = None
    compatible: str | None = None
    load: bool = True
    governor: str = "nvhost_podgov"
    cur_hz: int | None = None  # None: the lowest
    extra: tuple[str, ...] = ()  # further files of the device

    @property
    def device(self) -> str:
        return f"/sys/devices/platform/bus@0/{self.name}"

    @property
    def directory(self) -> str:
        """Where the attributes are; /sys/class/devfreq/NAME links there."""
        return f"{self.device}/devfreq/{self.name}"

    def files(self) -> Files:
        lowest, highest = self.frequencies[0], self.frequencies[-1]
        found: Files = {
            f"/sys/class/devfreq/{self.name}": Link(
                f"../../devices/platform/bus@0/{self.name}/devfreq/{self.name}"
            ),
            f"{self.directory}/device": Link(f"../../../{self.name}"),
            f"{self.directory}/available_frequencies": " ".join(map(str, self.frequencies)) + "\n",
            f"{self.directory}/min_freq": f"{lowest}\n",
            f"{self.directory}/max_freq": f"{highest}\n",
            f"{self.directory}/cur_freq": f"{lowest if self.cur_hz is None else self.cur_hz}\n",
            f"{self.directory}/governor": f"{self.governor}\n",
        }
        if self.of_name is not None:
            base = f"/sys/firmware/devicetree/base/bus@0/{self.name}"
            found[f"{self.device}/of_node"] = Link(
                f"../../../../firmware/devicetree/base/bus@0/{self.name}"
            )
            found[f"{base}/name"] = self.of_name + "\0"
            if self.compatible:
                found[f"{base}/compatible"] = self.compatible + "\0"
        if self.load:
            found[f"{self.device}/load"] = "198\n"
        for name in self.extra:
            found[f"{self.device}/{name}"] = "1\n"
        return found


@dataclass(frozen=True)
class Cooler:
    type: str
    max_state: int
    cur_state: int = 0


@dataclass(frozen=True)
class Trip:
    type: str
    temp_mc: int
    coolers: tuple[str, ...] = ()  # types of the cooling devices bound to it


@dataclass(frozen=True)
class Zone:
    type: str
    temp_mc: int
    trips: tuple[Trip, ...] = ()


@dataclass(frozen=True)
class Rail:
    label: str
    millivolts: int
    milliamperes: int


@dataclass(frozen=True)
class Board:
    key: str
    model: str
    chip: str
    release: str | None
    kernel: str
    gpu: str
    nodes: tuple[Node, ...]
    coolers: tuple[Cooler, ...]
    zones: tuple[Zone, ...]
    rails: tuple[Rail, ...]

    @property
    def gpu_node(self) -> Node:
        return next(node for node in self.nodes if node.name == self.gpu)

    def files(self) -> Files:
        found: Files = {
            "/proc/device-tree/model": self.model + "\0",
            "/proc/device-tree/compatible": f"nvidia,p0000\0nvidia,{self.chip}\0",
            "/proc/sys/kernel/osrelease": self.kernel + "\n",
            "/proc/sys/kernel/random/boot_id": "5b0f8a52-0c4e-4d6a-9d38-2f1c8a2f9b01\n",
        }
        if self.release:
            found["/etc/nv_tegra_release"] = self.release + "\n"
        for node in self.nodes:
            found |= node.files()
        virtual = "/sys/devices/virtual/thermal"
        for index, cooler in enumerate(self.coolers):
            name = f"cooling_device{index}"
            found[f"/sys/class/thermal/{name}"] = Link(f"../../devices/virtual/thermal/{name}")
            found[f"{virtual}/{name}/type"] = cooler.type + "\n"
            found[f"{virtual}/{name}/max_state"] = f"{cooler.max_state}\n"
            found[f"{virtual}/{name}/cur_state"] = f"{cooler.cur_state}\n"
        types = [cooler.type for cooler in self.coolers]
        for index, zone in enumerate(self.zones):
            name = f"thermal_zone{index}"
            found[f"/sys/class/thermal/{name}"] = Link(f"../../devices/virtual/thermal/{name}")
            found[f"{virtual}/{name}/type"] = zone.type + "\n"
            found[f"{virtual}/{name}/temp"] = f"{zone.temp_mc}\n"
            bound = 0
            for number, trip in enumerate(zone.trips):
                found[f"{virtual}/{name}/trip_point_{number}_type"] = trip.type + "\n"
                found[f"{virtual}/{name}/trip_point_{number}_temp"] = f"{trip.temp_mc}\n"
                for kind in trip.coolers:
                    device = f"cooling_device{types.index(kind)}"
                    found[f"{virtual}/{name}/cdev{bound}"] = Link(f"../{device}")
                    found[f"{virtual}/{name}/cdev{bound}_trip_point"] = f"{number}\n"
                    bound += 1
        if self.rails:
            chip = "/sys/devices/platform/bus@0/c240000.i2c/i2c-1/1-0040/hwmon/hwmon3"
            found["/sys/class/hwmon/hwmon3"] = Link("../.." + chip.removeprefix("/sys"))
            found[f"{chip}/name"] = "ina3221\n"
            for channel, rail in enumerate(self.rails, 1):
                found[f"{chip}/in{channel}_label"] = rail.label + "\n"
                found[f"{chip}/in{channel}_input"] = f"{rail.millivolts}\n"
                found[f"{chip}/curr{channel}_input"] = f"{rail.milliamperes}\n"
            found[f"{chip}/in7_label"] = "sum of shunt voltages\n"
            found[f"{chip}/in7_input"] = "9\n"
        return found

    def write(self, root: Path, *, sys: bool = True) -> None:
        """The board as plain files below `root`, with an empty /run. Without `sys`, /sys is
        left an empty directory, to mount something on."""
        for directory in ("run", "sys", "proc", "etc"):
            (root / directory).mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            if name.startswith("/sys/") and not sys:
                continue
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Link):
                path.symlink_to(content.target)
            else:
                path.write_text(content)


def _steps(low: int, high: int, step: int) -> tuple[int, ...]:
    return tuple(mhz * MHZ for mhz in range(low, high + 1, step))


def _khz(*values: int) -> tuple[int, ...]:
    return tuple(value * 1000 for value in values)


_ORIN_NANO = _steps(306, 1020, 102)
_AGX_ORIN = (*_steps(306, 1224, 102), 1_300_500_000)
_XAVIER = _khz(
    114750, 216750, 318750, 420750, 522750, 624750, 675750, 828750, 905250, 1032750, 1198500,
    1236750, 1338750, 1377000,
)  # fmt: skip
_TX2 = _khz(
    114750, 216750, 318750, 420750, 522750, 624750, 726750, 854250, 930750, 1032750, 1122000,
    1236750, 1300500,
)  # fmt: skip
_NANO = _khz(
    76800, 153600, 230400, 307200, 384000, 460800, 537600, 614400, 691200, 768000, 844800, 921600
)  # fmt: skip


def _engine(name: str, of_name: str) -> Node:
    """An engine that has its devfreq device beside the GPU's."""
    return Node(name, _steps(115, 1075, 120), of_name, f"nvidia,tegra234-{of_name}", load=False)


def _orin_thermal(gpu: str) -> tuple[tuple[Cooler, ...], tuple[Zone, ...]]:
    coolers = (
        Cooler("cpufreq-cpu0", 25), Cooler("cpufreq-cpu4", 25), Cooler(f"devfreq-{gpu}", 7),
        Cooler("pwm-fan", 4, cur_state=2), Cooler("cpu-throttle-alert", 1),
        Cooler("gpu-throttle-alert", 1), Cooler("cv0-throttle-alert", 1),
        Cooler("soc0-throttle-alert", 1), Cooler("hot-surface-alert", 1),
    )  # fmt: skip
    critical = Trip("critical", 104_500)
    zones = (
        Zone("cpu-thermal", 51_000, (
            Trip("passive", 99_000, ("cpufreq-cpu0", "cpu-throttle-alert")),
            critical, Trip("passive", 70_000, ("hot-surface-alert",)),
        )),
        Zone("gpu-thermal", 49_500, (
            Trip("passive", 99_000, (f"devfreq-{gpu}", "gpu-throttle-alert")),
            critical, Trip("passive", 70_000, ("hot-surface-alert",)),
        )),
        Zone("tj-thermal", 51_200, (Trip("active", 60_000, ("pwm-fan",)), critical)),
    )  # fmt: skip
    return coolers, zones


def _orin(
    key: str, model: str, release: str, kernel: str, gpu: Node, rails: tuple[Rail, ...]
) -> Board:
    coolers, zones = _orin_thermal(gpu.name)
    nodes = (
        gpu, _engine("15340000.vic", "vic"), _engine("15480000.nvdec", "nvdec"),
        Node("bwmgr", _steps(204, 2133, 643), load=False, governor="userspace"),
    )  # fmt: skip
    return Board(
        key, model, "tegra234", release, kernel, gpu.name, nodes, coolers, zones, rails
    )  # fmt: skip


_VDD_IN = (
    Rail("VDD_IN", 5000, 1610), Rail("VDD_CPU_GPU_CV", 5000, 520), Rail("VDD_SOC", 5000, 400)
)  # fmt: skip


def _older(
    key: str, model: str, chip: str, release: str, kernel: str, gpu: Node, rails: tuple[Rail, ...]
) -> Board:
    """Xavier, TX2, Nano: alert devices that differ, zones with their names in capitals."""
    nano = chip == "tegra210"
    alert = "gpu-balanced" if nano else "gpu-throttle-alert"
    emc = _engine("17000000.emc", "external-memory-controller")
    nodes = (gpu,) if nano else (gpu, _engine("15340000.vic", "vic"), emc)
    coolers = (Cooler("pwm-fan", 10, cur_state=3), Cooler(alert, 1))
    gpu_trips = (Trip("critical", 101_000), Trip("passive", 95_500, (alert,)))
    zones = (Zone("CPU-therm", 41_000), Zone("GPU-therm", 38_000, gpu_trips))
    return Board(key, model, chip, release, kernel, gpu.name, nodes, coolers, zones, rails)


ORIN_NANO_JP6 = _orin(
    "orin-nano-jp6",
    "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
    "# R36 (release), REVISION: 4.7, GCID: 42132812, BOARD: generic, EABI: aarch64",
    "5.15.148-tegra",
    Node(
        "17000000.gpu", _ORIN_NANO, "gpu", "nvidia,ga10b",
        extra=("enable_3d_scaling", "railgate_enable"),
    ),
    _VDD_IN,
)  # fmt: skip
AGX_ORIN_JP5 = _orin(
    "agx-orin-jp5",
    "Jetson AGX Orin Developer Kit",
    "# R35 (release), REVISION: 6.0, GCID: 37391689, BOARD: t186ref, EABI: aarch64",
    "5.10.216-tegra",
    Node("17000000.ga10b", _AGX_ORIN, "ga10b", "nvidia,ga10b", extra=("enable_3d_scaling",)),
    (
        Rail("VDD_GPU_SOC", 19500, 310),
        Rail("VDD_CPU_CV", 19500, 90),
        Rail("VIN_SYS_5V0", 5000, 820),
    ),
)
ORIN_NANO_JP7 = _orin(
    "orin-nano-jp7",
    "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
    "# R39 (release), REVISION: 2.0, GCID: 44311092, BOARD: generic, EABI: aarch64",
    "6.8.12-tegra",
    Node("17000000.gpu", _ORIN_NANO, "gpu", "nvidia,ga10b"),
    _VDD_IN,
)
THOR = Board(
    "thor",
    "NVIDIA Jetson AGX Thor Developer Kit",
    "tegra264",
    "# R38 (release), REVISION: 2.2, GCID: 42205042, BOARD: generic, EABI: aarch64",
    "6.8.12-tegra",
    "gpu-gpc-0",
    (
        Node("gpu-gpc-0", _steps(54, 1575, 9), load=False, cur_hz=0),
        Node("gpu-nvd-0", _steps(54, 1692, 9), load=False, cur_hz=0),
        Node("bwmgr", _steps(665, 4266, 3601), load=False, governor="userspace"),
    ),
    (
        Cooler("cpufreq-cpu0", 48), Cooler("pwm-fan", 4, cur_state=1),
        Cooler("cpu-throttle-alert", 2), Cooler("gpu-throttle-alert", 2),
        Cooler("soc012-throttle-alert", 2), Cooler("devfreq-gpu-gpc-0", 169),
        Cooler("devfreq-gpu-nvd-0", 182),
    ),
    (
        Zone("gpu-thermal", 45_000, (
            Trip("critical", 114_500),
            Trip("passive", 109_000, ("gpu-throttle-alert", "devfreq-gpu-gpc-0")),
        )),
        Zone("tj-thermal", 46_000, (Trip("critical", 114_500),)),
    ),
    (
        Rail("VDD_GPU", 12040, 640), Rail("VDD_CPU_SOC_MSS", 12040, 960),
        Rail("VIN_SYS_5V0", 5088, 1740),
    ),
)  # fmt: skip
XAVIER = _older(
    "xavier",
    "NVIDIA Jetson Xavier NX Developer Kit",
    "tegra194",
    "# R35 (release), REVISION: 4.1, GCID: 33958178, BOARD: t186ref, EABI: aarch64",
    "5.10.120-tegra",
    Node("17000000.gv11b", _XAVIER, "gv11b", "nvidia,gv11b"),
    (Rail("VDD_IN", 5000, 900), Rail("VDD_CPU_GPU_CV", 5000, 180), Rail("VDD_SOC", 5000, 260)),
)
TX2 = _older(
    "tx2",
    "NVIDIA Jetson TX2 Developer Kit",
    "tegra186",
    "# R32 (release), REVISION: 7.4, GCID: 33514132, BOARD: t186ref, EABI: aarch64",
    "4.9.337-tegra",
    Node("17000000.gp10b", _TX2, "gp10b", "nvidia,tegra186-gp10b\0nvidia,gp10b"),
    (),
)
NANO = _older(
    "nano",
    "NVIDIA Jetson Nano Developer Kit",
    "tegra210",
    "# R32 (release), REVISION: 7.4, GCID: 33514132, BOARD: t210ref, EABI: aarch64",
    "4.9.337-tegra",
    Node("57000000.gpu", _NANO, "gpu", "nvidia,tegra210-gm20b\0nvidia,gm20b"),
    (),
)

ALL = (ORIN_NANO_JP6, AGX_ORIN_JP5, ORIN_NANO_JP7, THOR, XAVIER, TX2, NANO)
BY_KEY = {board.key: board for board in ALL}
