"""Which board and JetPack, from the files that tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetuner.board.identity import Identity, identify
from moetuner.board.sysroot import SysRoot
from tests.support.boards import BY_KEY, ORIN_NANO_JP6


@pytest.mark.parametrize(
    ("key", "family", "l4t", "jetpack"),
    [
        ("orin-nano-jp6", "Orin", "36.4.7", 6),
        ("agx-orin-jp5", "Orin", "35.6.0", 5),
        ("orin-nano-jp7", "Orin", "39.2.0", 7),
        ("thor", "Thor", "38.2.2", 7),
        ("xavier", "Xavier", "35.4.1", 5),
        ("tx2", "TX2", "32.7.4", 4),
        ("nano", "Nano", "32.7.4", 4),
    ],
)
def test_each_board(tmp_path: Path, key: str, family: str, l4t: str, jetpack: int) -> None:
    board = BY_KEY[key]
    board.write(tmp_path)
    found = identify(SysRoot(tmp_path))
    assert found == Identity(board.model, board.chip, family, l4t, jetpack, board.kernel)
    assert found.jetson


def test_in_one_line(tmp_path: Path) -> None:
    ORIN_NANO_JP6.write(tmp_path)
    assert str(identify(SysRoot(tmp_path))) == (
        "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super, "
        "JetPack 6 (L4T 36.4.7), kernel 5.15.148-tegra"
    )


def test_another_machine(tmp_path: Path) -> None:
    found = identify(SysRoot(tmp_path))
    assert not found.jetson
    assert str(found) == "no Jetson"


@pytest.mark.parametrize(
    ("text", "l4t", "jetpack"),
    [
        ("# R99 (release), REVISION: 1.0, GCID: 1", "99.1.0", None),  # one that is to come
        ("R36 (release)", None, None),
        ("# R (release), REVISION: 4.7", None, None),
        ("", None, None),
        ("\x00" * 100, None, None),
    ],
)
def test_releases(tmp_path: Path, text: str, l4t: str | None, jetpack: int | None) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text(text)
    found = identify(SysRoot(tmp_path))
    assert (found.l4t, found.jetpack) == (l4t, jetpack)
