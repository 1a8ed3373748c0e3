"""What the pages say can be found: links, paths, names, commands, and the platform that one of them builds."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import common.platforms
from common.commands.main import app
from common.config import load_profile, load_run
from common.decoding import Completion, GenerationRequest, Scheduler, decode_requests

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((ROOT / "scripts" / "lab").glob("*.md"))]
FOLDERS = "common|configs|docs|graphs|lopa_ascend|lopa_cuda|models|quant|scripts|tests"
ENDINGS = "py|sh|md|yaml|json|jsonl|svg"
PACKAGES = "common|graphs|quant|lopa_ascend|lopa_cuda"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """(language, text) of what stands between fences, and ("prose", text) of what does not."""
    parts = re.split(r"(?m)^```(\w*)\n", text_of(page))
    languages = ["prose", *parts[1::2]]
    return [
        (language if place % 2 else "prose", text)
        for place, (language, text) in enumerate(zip(languages, parts[::2], strict=True))
    ]


def prose_of(page: Path) -> str:
    return "".join(text for language, text in blocks_of(page) if language == "prose")


def code_in(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose_of(page))


def blocks_in(page: Path, *languages: str) -> list[str]:
    return [text for language, text in blocks_of(page) if language in languages]


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", text_of(page))
    targets = [link or picture for link, picture in links]
    missing = [to for to in targets if "://" not in to and not (page.parent / to).exists()]
    assert not missing, f"{page.name} links to {missing}"


@every_page
def test_paths_exist(page: Path) -> None:
    paths = re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./-]+\.(?:{ENDINGS}))\b", text_of(page))
    folders = [code for code in code_in(page) if re.fullmatch(rf"(?:{FOLDERS})(?:/\w+)*/?", code)]
    missing = [path for path in {*paths, *folders} if not (ROOT / path).exists()]
    assert not missing, f"{page.name} names {missing}"


@every_page
def test_files_named_without_a_folder_exist(page: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    known = {Path(line).name for line in listed.stdout.splitlines() if (ROOT / line).is_file()}
    named = {code for code in code_in(page) if re.fullmatch(r"[\w-]+\.(?:py|sh)", code)}
    assert named <= known, f"{page.name} names {sorted(named - known)}"


@every_page
def test_tests_that_a_page_rests_on_exist(page: Path) -> None:
    named = {code for code in code_in(page) if re.fullmatch(r"test_\w+", code)}
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")) if named else ""
    assert all(f"def {name}(" in tests for name in named), f"{page.name} names {sorted(named)}"


@every_page
def test_what_a_file_is_said_to_hold_is_in_it(page: Path) -> None:
    """`common/decoding/loop.py: decode_requests`"""
    for path, name in re.findall(rf"`((?:{FOLDERS})/[\w./-]+\.py): (\w+)`", text_of(page)):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        targets = [node for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
        assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert name in {node.name for node in targets} | assigned, f"{page.name}: {path} holds no {name}"


@every_page
def test_dotted_names_can_be_imported(page: Path) -> None:
    """`common.decoding.GenerationRequest`; also what examples import."""
    named = [code for code in code_in(page) if re.fullmatch(rf"(?:{PACKAGES})(?:\.\w+)+", code)]
    for block in blocks_in(page, "python"):
        for module, names in re.findall(rf"(?m)^from ((?:{PACKAGES})[\w.]*) import ([\w, ]+)$", block):
            named += [f"{module}.{name.strip()}" for name in names.split(",")]
    missing = [name for name in named if not is_there(name)]
    assert not missing, f"{page.name} names {missing}"


def is_there(name: str) -> bool:
    """A module, or something that one holds."""
    module, _, attribute = name.rpartition(".")
    try:
        return find_spec(name) is not None or hasattr(import_module(module), attribute)
    except ModuleNotFoundError:  # what is in front of the last dot is no package
        return find_spec(module) is not None and hasattr(import_module(module), attribute)


@every_page
def test_commands_are_there(page: Path) -> None:
    known = {command.name or (command.callback and command.callback.__name__) for command in app.registered_commands}
    code = [*code_in(page), *blocks_in(page, "bash", "")]
    named = {found for text in code for found in re.findall(r"(?m)^lopa ([a-z][a-z-]*)", text)}
    assert named <= known, f"{page.name} names {sorted(named - known)}"


@every_page
def test_prose_fits_a_window(page: Path) -> None:
    """Tables and indented commands may be wider."""
    long = [line for line in prose_of(page).splitlines() if len(line) > 120]
    assert not [line for line in long if not re.match(r" *\||    ", line)], f"{page.name}: split {long}"


def test_every_page_is_in_the_index() -> None:
    listed = set(re.findall(r"\]\((\w+\.md)\)", text_of(DOCS / "README.md")))
    assert listed == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


def test_the_front_page_has_one_short_table_of_results() -> None:
    """Every number in it, with its error, is one of the results page."""
    (table,) = (found for found in re.findall(r"(?m)^(?:\|.*\n)+", text_of(ROOT / "README.md")) if "±" in found)
    assert len(table.splitlines()) <= 2 + 8
    numbers = re.findall(r"[\d.]+ ± [\d.]+ % \|", table)
    assert numbers and all(number in text_of(DOCS / "results.md") for number in numbers)


def test_the_curve_is_that_of_its_files() -> None:
    page = text_of(DOCS / "results.md")
    for kind in ("math", "code"):
        for row in json.loads((DOCS / "results" / f"lookahead_{kind}.json").read_text())["rows"]:
            cells = f"{100 * row['accuracy']:.1f} ± {100 * row['standard_error']:.1f} % | {row['tpf_canvas']:.2f} | "
            cells += f"{row['tpf_effective']:.2f} | {row['steps']:.1f} |"
            line = next(line for line in page.splitlines() if re.match(rf"\| {row['num_lookahead']} \|", line))
            assert cells in line, f"{kind}, k = {row['num_lookahead']}"


def test_the_steps_of_one_row_are_those_of_their_file() -> None:
    page = text_of(DOCS / "performance.md")
    for shape in json.loads((DOCS / "results" / "steps_h200.json").read_text())["shapes"]:
        step, floors = shape["device_ms"], (shape["weight_floor_ms"], shape["matrix_floor_ms"])
        cells = (step, shape["call_ms"], *floors)
        line = f"| {shape['width']} | {' | '.join(f'{cell:.3f}' for cell in cells)} | {step / max(floors):.2f} |"
        assert line in page, f"window {shape['width']}: {line}"


def test_the_third_platform_of_the_architecture_page_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    example, provider = blocks_in(DOCS / "architecture.md", "python")
    module = ModuleType("lopa_seven.platforms")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(example, module.__dict__)
    table: dict[str, tuple[str, ...]] = {}
    exec(provider, table)
    assert set(table["_PROVIDERS"]) == {*common.platforms._PROVIDERS, module.__name__}
    monkeypatch.setattr(common.platforms, "_PROVIDERS", table["_PROVIDERS"])
    common.platforms.all_platforms.cache_clear()
    try:
        platform = common.platforms.platform_of_device("seven")
    finally:
        common.platforms.all_platforms.cache_clear()
    run = load_run(ROOT / "configs" / "runs" / "demo.yaml")
    engine = platform.build_engine(load_profile(ROOT / "configs" / "profiles" / "cpu.yaml"), run)
    scheduler = Scheduler(run.decode, mask_token_id=1, eos_token_id=None)
    (completion,) = decode_requests(iter([GenerationRequest("a", (2, 3))]), scheduler, engine)
    assert isinstance(completion, Completion)
    assert set(completion.token_ids) == {7}
    assert len(completion.token_ids) == run.decode.max_new_tokens
