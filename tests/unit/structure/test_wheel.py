"""The wheel works where there is no checkout: the command, the shipped profiles, runs and sweeps, the Python API."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("common", "configs", "graphs", "lopa_ascend", "lopa_cuda", "models", "quant")

pytestmark = [
    pytest.mark.skipif(find_spec("setuptools") is None, reason="the wheel is built with setuptools"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy without anything that earlier builds left behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel in it. What it depends on is taken from this one, but not its editable `lopa`:
    a path in a .pth file adds a folder without reading the .pth files there."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=300)
    python = folder / "bin" / "python"
    ask = [python, "-c", "import site; print(site.getsitepackages()[0])"]
    site = Path(subprocess.check_output(ask, text=True).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "-q", str(wheel)]
    subprocess.run(command, env=apart(), check=True, capture_output=True, timeout=300)
    return python


def apart() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}


def start(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"NUMBA_DISABLE_JIT": "1"}  # machine code is kept by path: these would be compiled for a minute
    command = [str(python), *arguments]
    return subprocess.run(command, cwd=folder, env=apart() | environment, capture_output=True, text=True, timeout=300)


def test_it_holds_the_packages_and_the_shipped_settings_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in names} == set(PACKAGES)
    for folder in ("configs", "models/demo", "common/serving/page"):
        shipped = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.is_file()}
        shipped = {name for name in shipped if not name.endswith(".pyc")}
        assert {name for name in names if name.startswith(f"{folder}/")} == shipped
    assert all(name.startswith("models/demo/") for name in names if name.startswith("models/"))


def test_it_decodes_with_a_shipped_profile_and_run(installed: Path, tmp_path: Path) -> None:
    done = start(
        installed,
        tmp_path,
        "-m",
        "common.commands",
        "run",
        "--profile",
        "cpu",
        "demo",
        "--limit",
        "2",
        "-o",
        "out.jsonl",
    )
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    environment = json.loads((tmp_path / "out.metrics.json").read_text())["environment"]
    assert environment["commit"] is None, "it does not run from a checkout"


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (("doctor", "--profile", "cpu"), "profile cpu: can run here"),
        (("estimate", "dream_7b_dummy", "--profile", "ascend_910c_tp4_bp4"), "ms a step"),
        (("demo", "--num-problems", "1"), "LoPA, k = 7"),
        (("run", "--profile", "nope", "demo"), "not one of the profiles in"),
    ],
)
def test_commands_find_what_is_shipped(
    installed: Path, tmp_path: Path, arguments: tuple[str, ...], printed: str
) -> None:
    done = start(installed, tmp_path, "-m", "common.commands", *arguments)
    assert printed in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_console_script_and_the_python_api(installed: Path, tmp_path: Path) -> None:
    lopa = start(installed.with_name("lopa"), tmp_path, "--version")
    assert lopa.returncode == 0 and lopa.stdout.startswith("lopa "), lopa.stderr
    code = (
        "from common.config import load_profile, load_run\n"
        "from common.generate import build_generator\n"
        "with build_generator(load_profile('cpu'), load_run('demo')) as generator:\n"
        "    print(generator.complete('Tom has 12 apples and buys 5 more. How many apples does he have now?\\n'))\n"
    )
    done = start(installed, tmp_path, "-c", code)
    assert done.returncode == 0 and "17" in done.stdout, done.stderr


def test_scripts_start_the_wheel_where_there_is_no_checkout(installed: Path, tmp_path: Path) -> None:
    """The images of configs/cluster have the wheel and the scripts alone."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("*.py", "lab", "__pycache__"))
    environment = {**os.environ, "PYTHON": str(installed), "DRY_RUN": "1"}
    environment.pop("PYTHONPATH", None)
    command = ["scripts/serve.sh", "h200_tp1_bp4", "demo", "--host", "0.0.0.0"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert "--nproc-per-node=4" in done.stdout and str(ROOT) not in done.stdout, done.stderr
