"""What the pages say can be found: links, paths, names, commands; and their numbers are those of the result files."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import draw_rooms
import pytest
from typer.main import get_command

from common.commands.main import app
from common.config import load_run
from scripts.lab import tables
from scripts.lab.views import View

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
NUMBERED = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]  # their measurements come from result files
PAGES = [*NUMBERED, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md",
         *sorted((ROOT / "scripts" / "lab").glob("*.md")), *sorted((ROOT / "models").glob("*/README.md"))]  # fmt: skip
FOLDERS = "common|configs|docs|examples|graphs|lopa_ascend|lopa_cuda|models|quant|scripts|tests"
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
    """They lead to files, and to headings of this page and of others."""
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text_of(page))
    targets = [link or picture for link, picture in links]
    missing = [to for to in targets if "://" not in to and not leads_somewhere(page, to)]
    assert not missing, f"{page.name} links to {missing}"


def leads_somewhere(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    to = page.parent / name if name else page
    return to.exists() and (not anchor or anchor in anchors_of(to))


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of headings."""
    headings = re.findall(r"(?m)^#+ (.+)$", prose_of(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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
def test_options_of_commands_are_there(page: Path) -> None:
    """Commands that read their own arguments, such as `lopa bench`, are left out."""
    commands = vars(get_command(app))["commands"]
    for name, rest in re.findall(r"(?m)^lopa ([a-z-]+)((?:.*\\\n)*.*)", "\n".join(blocks_in(page, "bash"))):
        if "ignore_unknown_options" not in commands[name].context_settings:
            known = {option for parameter in commands[name].params for option in parameter.opts}
            named = set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", rest.partition("#")[0]))
            assert named <= known, f"{page.name}: lopa {name} has no {sorted(named - known)}"


@every_page
def test_run_files_are_read(page: Path, tmp_path: Path) -> None:
    for number, text in enumerate(block for block in blocks_in(page, "yaml") if re.search(r"(?m)^model:", block)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text, encoding="utf-8")
        assert load_run(path).model in text


@every_page
def test_prose_fits_a_window(page: Path) -> None:
    """Tables and indented commands may be wider."""
    long = [line for line in prose_of(page).splitlines() if len(line) > 120]
    assert not [line for line in long if not re.match(r" *\||    ", line)], f"{page.name}: split {long}"


def test_every_page_is_in_the_index() -> None:
    listed = set(re.findall(r"\]\((\w+\.md)\)", text_of(DOCS / "README.md")))
    assert listed == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_a_page_begins_with_its_readers(page: Path) -> None:
    assert text_of(page).split("\n\n")[1].startswith("Read this if "), page.name


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_those_of_the_result_files(page: Path) -> None:
    assert tables.with_tables(text_of(page), written()) == text_of(page), "run python -m scripts.lab.tables"


@cache
def written() -> dict[str, str]:
    return tables.tables()


@pytest.mark.parametrize("page", NUMBERED, ids=lambda page: page.name)
def test_measurements_stand_in_no_table_written_by_hand(page: Path) -> None:
    by_hand = re.sub(r"(?s)<!-- table: .*?<!-- end -->", "", prose_of(page))
    rows = [line for line in by_hand.splitlines() if len(re.findall(r"\| *[+-]?\d[\d,]*\.\d+ *(?=\|)", line)) >= 2]
    assert not rows, f"{page.name}: put these into a file of docs/results: {rows}"


def test_a_table_that_was_edited_is_found() -> None:
    text = "<!-- table: a -->\n| 1 |\n<!-- end -->\n"
    assert tables.with_tables(text, {"a": "| 2 |\n"}) == text.replace("1", "2")
    with pytest.raises(ValueError, match="no table is called a: there are b"):
        tables.with_tables(text, {"b": ""})
    with pytest.raises(ValueError, match="no `<!-- end -->`"):
        tables.with_tables("<!-- table: a -->\n", {})


def test_a_result_file_says_once_where_its_numbers_are_from() -> None:
    result = {"card": "NVIDIA H200", "commit": "1234567", "conditions": "Two rows.", "command": "lopa bench steps",
              "columns": [["case", ""], ["ms", ".2f"]], "rows": [["a", 1.234], ["b", None]]}  # fmt: skip
    source, _, text = tables.table(result).partition("\n\n")
    assert source == "NVIDIA H200, at commit 1234567. Two rows. `lopa bench steps`."
    assert text.splitlines()[2:] == ["| a | 1.23 |", "| b | - |"]


def test_a_page_may_show_some_rows_and_columns_of_a_table() -> None:
    result = {"card": "NVIDIA H200", "conditions": "Two rows.", "columns": [["case", ""], ["k", ""], ["ms", ".1f"]],
              "rows": [["a", "0", 1.25], ["a", "3", 2.0], ["b", "0", None]]}  # fmt: skip
    view = View({"k": "lookaheads", "ms": "ms"}, where={"case": ("a",)}, conditions="One case", words={"0": "none"})
    source, _, text = tables.short({"steps": result}, "steps", view).partition("\n\n")
    assert source == "NVIDIA H200. One case."
    assert text.splitlines() == ["| lookaheads | ms |", "| --- | ---: |", "| none | 1.2 |", "| 3 | 2.0 |"]
    with pytest.raises(ValueError, match=r"steps has no case of \['c'\]"):
        tables.short({"steps": result}, "steps", View({"ms": "ms"}, where={"case": ("c",)}))


def test_the_drawing_of_the_rooms_is_that_of_the_imports() -> None:
    drawn = draw_rooms.drawing(draw_rooms.uses())
    page = text_of(draw_rooms.PAGE)
    assert draw_rooms.with_drawing(page, drawn) == page and drawn in page, "run python scripts/draw_rooms.py"


def test_arrows_that_follow_from_others_are_left_out() -> None:
    rooms: dict[str, set[str]] = {"top": {"middle", "low"}, "middle": {"low"}, "low": set()}
    assert draw_rooms.drawing(rooms).splitlines()[2:-1] == ["    top --> middle", "    middle --> low"]
    with pytest.raises(ValueError, match="circle: top -> low -> top"):
        draw_rooms.drawing({"top": {"low"}, "low": {"top"}})


def test_the_files_of_a_requests_way_are_counted() -> None:
    section = text_of(DOCS / "architecture.md").partition("## A request's way")[2].partition("\n## ")[0]
    files = set(re.findall(rf"`((?:{PACKAGES})/[\w/]+\.py)", section))
    assert f"through {len(files)} files" in section
