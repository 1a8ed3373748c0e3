"""Build shared libraries that stand in for CANN, so that the real torch_npu wheel can be loaded without it.

The wheel's libraries name the CANN libraries they need and are linked to resolve every symbol at load time. So: collect
the sonames that nothing here provides and the symbols that nothing here defines; cann.cpp holds the bodies that matter,
each other symbol returns 0 (success). One library holds all symbols, the others are empty shells that pull it in.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

CANN_CPP = Path(__file__).with_name("cann.cpp")
HOLDER = "libascendcl.so"
TOOLS = ("g++", "nm", "readelf")
_SYSTEM_FOLDERS = ("/lib", "/usr/lib", "/lib64", "/usr/lib64")
# Looked up by name at run time; they appear as plain strings in the wheel's libraries.
_BY_NAME = re.compile(
    rb"\0((?:acl(?:rt|mdlRI|mdl|op|sys|sk|prof)[A-Z]|acl(?:Get|Set|Create|Destroy)[A-Z]|Hccl[A-Z])[A-Za-z0-9]+)(?=\0)"
)
# Tails of mangled names that the pattern above also meets.
_NOT_A_FUNCTION = re.compile(r"(GH|GL|rH|rf|tH|H|L|M)$")


def build(torch_npu: Path, torch: Path, out: Path) -> None:
    """Fill `out`; it appears whole or not at all, so that concurrent builders do no harm."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        _build_into(torch_npu, torch, Path(scratch))
        finished = Path(scratch) / "finished"
        finished.mkdir()
        for library in Path(scratch).glob("*.so"):
            library.rename(finished / library.name)
        if not out.exists():
            finished.rename(out)


def libraries(folder: Path) -> list[Path]:
    """What to load, the holder first."""
    return sorted(folder.glob("*.so"), key=lambda path: (path.name != HOLDER, path.name))


def missing_tools() -> list[str]:
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def _build_into(torch_npu: Path, torch: Path, scratch: Path) -> None:
    wheel = [
        *(torch_npu / "lib").glob("*.so"),
        *torch_npu.glob("_C*.so"),
        *(torch_npu / "dynamo/torchair/core").glob("*.so"),
    ]
    torch_libraries = list((torch / "lib").glob("*.so*"))
    system = _system_libraries()
    known = {path.name for path in [*wheel, *torch_libraries]}
    needed = {name for library in wheel for name in _needed(library)} - known
    absent = sorted(needed - system.keys())
    providers = [*wheel, *torch_libraries, *(system[name] for name in needed & system.keys()), *_python_libraries()]
    provided = {name for path in providers for name in _symbols(path, "--defined-only")}
    wanted = {name for path in wheel for name, kind in _symbols(path, "--undefined-only").items() if kind not in "wv"}
    by_name = {name for path in wheel for name in _names_in(path)}
    _compile(scratch, (wanted | by_name) - provided, absent)


def _compile(scratch: Path, symbols: set[str], sonames: list[str]) -> None:
    written = scratch / "cann.o"
    _run("g++", "-std=c++17", "-O1", "-fPIC", "-c", str(CANN_CPP), "-o", str(written))
    remaining = sorted(symbols - set(_symbols(written, "--defined-only", dynamic=False)))
    source = scratch / "returns_zero.c"
    lines = ["long lopa_sim_called(const char*);"]
    for index, name in enumerate(remaining):
        lines.append(f'__attribute__((visibility("default"), weak)) long stub_{index}(void) __asm__("{name}");')
        lines.append(f'long stub_{index}(void) {{ return lopa_sim_called("{name}"); }}')
    source.write_text("\n".join(lines) + "\n")
    generated = source.with_suffix(".o")
    _run("g++", "-x", "c", "-c", "-fPIC", str(source), "-o", str(generated))
    _link(scratch, HOLDER, str(written), str(generated))
    for soname in sonames:
        if soname != HOLDER:
            _link(scratch, soname, "-Wl,--no-as-needed", str(scratch / HOLDER))


def _link(scratch: Path, soname: str, *inputs: str) -> None:
    _run("g++", "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", str(scratch / soname), *inputs)


def _needed(library: Path) -> list[str]:
    return re.findall(r"NEEDED\).*\[(.+?)\]", _run("readelf", "-d", str(library)))


def _symbols(path: Path, which: str, dynamic: bool = True) -> dict[str, str]:
    """Name without its version -> kind letter."""
    table = _run("nm", *(["-D"] if dynamic else []), which, str(path))
    rows = (line.split() for line in table.splitlines())
    return {row[-1].split("@")[0]: row[-2] for row in rows if len(row) >= 2}


def _names_in(library: Path) -> set[str]:
    names = {match.decode() for match in _BY_NAME.findall(library.read_bytes())}
    return {name for name in names if not _NOT_A_FUNCTION.search(name)}


def _system_libraries() -> dict[str, Path]:
    triplet = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    folders = [Path(folder) for folder in _SYSTEM_FOLDERS]
    folders += [folder / triplet for folder in folders]
    return {path.name: path for folder in folders if folder.is_dir() for path in folder.glob("*.so*")}


def _python_libraries() -> list[Path]:
    folder = Path(sysconfig.get_config_var("LIBDIR") or "/nonexistent")
    return [Path(sys.executable).resolve(), *folder.glob("libpython3*.so*")]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:2])} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
