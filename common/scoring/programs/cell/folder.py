"""Take a folder away, however deep it is and whatever its permissions are."""

# pathlib takes longer to load than everything else here.
# ruff: noqa: PTH101, PTH106, PTH108, PTH114

from __future__ import annotations

import os

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove(path: str) -> None:
    """Remove a folder that nobody writes into any more, or a link in its place, if it is there. What cannot be removed
    stays, without an error.

    One descriptor is open at a time and nothing recurses: neither has a tree of a hundred thousand folders too many of.
    """
    try:
        if os.path.islink(path):
            os.unlink(path)
            return
        os.chmod(path, 0o700)
        _empty(os.open(path, _FOLDER))
        os.rmdir(path)
    except OSError:
        return


def _empty(current: int) -> None:
    way: list[str] = []
    try:
        left = [_remove_what_goes(current)]
        while way or left[-1]:
            down = left[-1].pop() if left[-1] else None
            following = os.open("..", _FOLDER, dir_fd=current) if down is None else _enter(down, current)
            os.close(current)
            current = following
            if down is None:
                left.pop()
                os.rmdir(way.pop(), dir_fd=current)
            else:
                way.append(down)
                left.append(_remove_what_goes(current))
    finally:
        os.close(current)


def _remove_what_goes(folder: int) -> list[str]:
    """Remove files and empty folders; return the names of the other folders."""
    with os.scandir(folder) as entries:
        is_folder_of = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    others: list[str] = []
    for name, is_folder in is_folder_of.items():
        if not is_folder:
            os.unlink(name, dir_fd=folder)
            continue
        try:
            os.rmdir(name, dir_fd=folder)
        except OSError:
            others.append(name)
    return others


def _enter(name: str, folder: int) -> int:
    os.chmod(name, 0o700, dir_fd=folder)
    return os.open(name, _FOLDER, dir_fd=folder)
