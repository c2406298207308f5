"""Power, clock, load, temperatures: what is not available is None, never 0."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moetuner.board.sysroot import SysRoot
from moetuner.board.telemetry import JTOP_SOCKET, JtopPower, Sample, Telemetry
from tests.support.boards import AGX_ORIN_JP5, MHZ, NANO, ORIN_NANO_JP6, THOR


def test_an_orin_nano(tmp_path: Path) -> None:
    ORIN_NANO_JP6.write(tmp_path)
    sample = Telemetry(SysRoot(tmp_path), ORIN_NANO_JP6.gpu).read()
    assert sample == Sample(
        power_mw=8050,
        power_source="INA3221 VDD_IN",
        rails_mw={"VDD_IN": 8050, "VDD_CPU_GPU_CV": 2600, "VDD_SOC": 2000},
        gpu_hz=306 * MHZ,
        gpu_min_hz=306 * MHZ,
        gpu_max_hz=1020 * MHZ,
        gpu_load_percent=19.8,
        temperatures_c={"cpu-thermal": 51.0, "gpu-thermal": 49.5, "tj-thermal": 51.2},
    )


def test_thor_has_no_load_and_no_rail_for_the_whole_board(tmp_path: Path) -> None:
    THOR.write(tmp_path)
    sample = Telemetry(SysRoot(tmp_path), THOR.gpu).read()
    assert sample.gpu_load_percent is None
    assert sample.power_mw is None
    assert sample.rails_mw["VDD_GPU"] == 7706
    assert sample.gpu_hz == 0  # it says so itself


def test_shunts_and_their_sum_are_no_rails(tmp_path: Path) -> None:
    AGX_ORIN_JP5.write(tmp_path)
    sample = Telemetry(SysRoot(tmp_path), AGX_ORIN_JP5.gpu).read()
    assert set(sample.rails_mw) == {"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"}


def test_a_machine_that_has_none_of_it(tmp_path: Path) -> None:
    assert Telemetry(SysRoot(tmp_path), None).read() == Sample()
    assert Telemetry(SysRoot(tmp_path), "17000000.gpu").read() == Sample()


def test_a_rail_that_is_switched_off_and_a_sensor_without_power(tmp_path: Path) -> None:
    ORIN_NANO_JP6.write(tmp_path)
    (tmp_path / "sys/class/hwmon/hwmon3/curr1_input").write_text("\n")
    (tmp_path / "sys/class/thermal/thermal_zone1/temp").write_text("-256000\n")
    sample = Telemetry(SysRoot(tmp_path), ORIN_NANO_JP6.gpu).read()
    assert sample.power_mw is None
    assert set(sample.rails_mw) == {"VDD_CPU_GPU_CV", "VDD_SOC"}
    assert set(sample.temperatures_c) == {"cpu-thermal", "tj-thermal"}


@pytest.mark.parametrize(("told", "expected"), [(5230, (5230, "jtop")), (None, (None, None))])
def test_jtop_where_there_is_no_rail(
    tmp_path: Path, told: int | None, expected: tuple[int | None, str | None]
) -> None:
    NANO.write(tmp_path)
    sample = Telemetry(SysRoot(tmp_path), NANO.gpu, lambda: told).read()
    assert (sample.power_mw, sample.power_source) == expected


def test_the_board_s_own_rail_goes_before_jtop(tmp_path: Path) -> None:
    ORIN_NANO_JP6.write(tmp_path)
    assert Telemetry(SysRoot(tmp_path), None, lambda: 1).read().power_mw == 8050


# -- jtop ----------------------------------------------------------------------------------


class JtopError(Exception):
    pass


class Client:
    """As jtop's: `ok` waits unless told to spin, and raises what its thread met."""

    power: Any = None
    start_error: Exception | None = None
    ok_error: Exception | None = None
    closed = False

    def start(self) -> None:
        if self.start_error:
            raise self.start_error

    def ok(self, spin: bool = False) -> bool:
        assert spin, "this would block"
        if self.ok_error:
            raise self.ok_error
        return True

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def root(tmp_path: Path) -> SysRoot:
    (tmp_path / "run").mkdir()
    (tmp_path / JTOP_SOCKET.lstrip("/")).touch()
    return SysRoot(tmp_path)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    client = Client()
    client.power = {"tot": {"power": 5230}}
    module: Any = SimpleNamespace(jtop=lambda: client, JtopException=JtopError)
    monkeypatch.setitem(sys.modules, "jtop", module)
    return client


def test_jtop(root: SysRoot, client: Client) -> None:
    power = JtopPower(root)
    assert power.problem is None
    assert power() == 5230
    power.close()
    assert client.closed
    assert power() is None


@pytest.mark.parametrize("told", [{}, {"tot": {}}, {"tot": {"power": None}}, None])
def test_jtop_tells_no_power(root: SysRoot, client: Client, told: Any) -> None:
    client.power = told
    assert JtopPower(root)() is None


def test_jtop_s_service_does_not_run(tmp_path: Path) -> None:
    power = JtopPower(SysRoot(tmp_path))
    assert power.problem == "jtop's service does not run"
    assert power() is None


def test_jtop_is_not_installed(root: SysRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jtop", cast(Any, None))
    assert JtopPower(root).problem == "jetson-stats is not installed"


@pytest.mark.parametrize("error", [JtopError("version mismatch"), ConnectionRefusedError("no")])
def test_jtop_refuses(root: SysRoot, client: Client, error: Exception) -> None:
    client.start_error = error
    power = JtopPower(root)
    assert power.problem == f"jtop: {error}"
    assert power() is None


def test_jtop_is_lost(root: SysRoot, client: Client) -> None:
    power = JtopPower(root)
    client.ok_error = JtopError("lost connection")
    assert power() is None
    assert power.problem == "jtop: lost connection"
