"""Which board this is: model, chip, JetPack."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moetuner.board.sysroot import SysRoot

# Jetson Linux (L4T) major release → JetPack major release
_JETPACK = {32: 4, 34: 5, 35: 5, 36: 6, 38: 7, 39: 7}
_CHIPS = {
    "tegra264": "Thor",
    "tegra234": "Orin",
    "tegra194": "Xavier",
    "tegra186": "TX2",
    "tegra210": "Nano",
}


@dataclass(frozen=True)
class Identity:
    """None: not told. `jetson` is false for any other machine."""

    model: str | None = None  # `NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super`
    chip: str | None = None  # `tegra234`
    family: str | None = None  # `Orin`
    l4t: str | None = None  # `36.4.7`
    jetpack: int | None = None  # 6
    kernel: str | None = None  # `5.15.148-tegra`

    @property
    def jetson(self) -> bool:
        return self.family is not None

    def __str__(self) -> str:
        """One line: `NVIDIA Jetson Orin Nano …, JetPack 6 (L4T 36.4.7), kernel 5.15.148-tegra`"""
        release = f"L4T {self.l4t}" if self.l4t else None
        if release and self.jetpack:
            release = f"JetPack {self.jetpack} ({release})"
        kernel = f"kernel {self.kernel}" if self.kernel else None
        return ", ".join(part for part in (self.model or "no Jetson", release, kernel) if part)


def identify(root: SysRoot) -> Identity:
    """From the device tree and /etc/nv_tegra_release; never raises."""
    compatible = root.read_optional("/proc/device-tree/compatible") or ""
    chip = next((chip for chip in _CHIPS if f"nvidia,{chip}" in compatible.split("\0")), None)
    l4t, major = _release(root.read_optional("/etc/nv_tegra_release") or "")
    return Identity(
        model=root.read_optional("/proc/device-tree/model"),
        chip=chip,
        family=_CHIPS[chip] if chip else None,
        l4t=l4t,
        jetpack=_JETPACK.get(major) if major else None,
        kernel=root.read_optional("/proc/sys/kernel/osrelease"),
    )


def _release(text: str) -> tuple[str | None, int | None]:
    """`# R36 (release), REVISION: 4.7, GCID: …` → (`36.4.7`, 36)"""
    match = re.match(r"#\s*R(\d{1,3})\s*\(release\),\s*REVISION:\s*([\d.]{1,16})", text)
    return (f"{match[1]}.{match[2]}", int(match[1])) if match else (None, None)
