"""A folder goes away whatever was made of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from common.scoring.programs.cell.folder import remove

NOBODY = 65534


def deep(folder: Path) -> None:
    current = os.open(folder, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=current)
        following = os.open("d", os.O_RDONLY, dir_fd=current)
        os.close(current)
        current = following
    os.close(current)


def without_rights(folder: Path) -> None:
    for place, mode in enumerate((0, 0o100, 0o200, 0o300, 0o400, 0o500, 0o600)):
        inner = folder / str(place) / "inner"
        inner.mkdir(parents=True)
        (inner / "file").touch(0)
        inner.chmod(mode)
        inner.parent.chmod(mode)
    folder.chmod(0)


def wide(folder: Path) -> None:
    for place in range(1500):
        (folder / str(place)).mkdir()
        (folder / str(place) / "file").touch()


def odd(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "circle").symlink_to("circle")
    (folder / "root").symlink_to("/")
    (folder / "\udcff\n").mkdir()
    (folder / ("x" * 255)).mkdir()


def nothing(folder: Path) -> None:
    folder.rmdir()


def in_a_child(action: Callable[[], None]) -> int:
    """Run in a child as a user whom rights bind."""
    child = os.fork()
    if not child:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("make", [deep, without_rights, wide, odd, nothing])
def test_a_folder_goes_away(make: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o777)
        target = Path(parent) / "target"

        def make_and_remove() -> None:
            target.mkdir()
            make(target)
            remove(str(target))

        assert in_a_child(make_and_remove) == 0
        assert list(Path(parent).iterdir()) == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "out").symlink_to(tmp_path)
    remove(str(tmp_path / "target"))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_link_in_its_place_goes_and_leaves_what_it_names(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    kept.chmod(0o755)  # whatever the umask is
    (tmp_path / "link").symlink_to(kept)
    remove(str(tmp_path / "link"))
    assert list(tmp_path.iterdir()) == [kept]
    assert kept.stat().st_mode & 0o777 == 0o755
