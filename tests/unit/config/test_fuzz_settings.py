"""Settings files of any kind: a checked object, or one sentence that names the file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing import bounded, fuzzed
from hypothesis import given
from hypothesis import strategies as st

from common.config import find_config, load_profile, load_run, load_sweep
from common.errors import ConfigError

LOADERS = {
    "profiles": load_profile,
    "runs": load_run,
    "sweeps": lambda path, overrides=(): load_sweep(Path(path), "cpu", "demo"),
}
SHIPPED = {
    kind: sorted(find_config(kind, "demo" if kind != "profiles" else "cpu").parent.glob("*.yaml")) for kind in LOADERS
}  # type: ignore[arg-type]
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.just([]), st.just({}), st.dates(),
    st.sampled_from([-1, 0, "auto", "-1", "null", 10**400, math.nan, "\u2028", "\0", [None], {"": ""}, "*a", "<<"]),
)  # fmt: skip
ODD_KEYS = st.one_of(
    st.text(max_size=10), st.integers(), st.none(), st.sampled_from(["model", "decode", "input", "mesh"])
)
TREES = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ODD_KEYS, inner, max_size=4), max_leaves=20
)


def check(kind: str, path: Path, *overrides: str) -> None:
    with bounded():
        try:
            LOADERS[kind](path, overrides) if kind != "sweeps" else LOADERS[kind](path)  # type: ignore[operator]
        except ConfigError as error:
            assert str(error) and "\n" not in str(error)
            assert str(path) in str(error) or "--set" in str(error)


@fuzzed
@given(kind=st.sampled_from(sorted(LOADERS)), tree=TREES)
def test_any_tree(kind: str, tree: Any, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8", errors="surrogatepass")
    check(kind, path)


@fuzzed
@given(data=st.data(), kind=st.sampled_from(sorted(LOADERS)))
def test_a_shipped_file_with_one_value_changed(data: st.DataObject, kind: str, tmp_path: Path) -> None:
    tree = yaml.safe_load(data.draw(st.sampled_from(SHIPPED[kind])).read_text())
    node = tree
    while True:
        key = data.draw(st.sampled_from(sorted(node, key=str)))
        if not isinstance(node[key], dict) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(TREES)
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    check(kind, path)


@fuzzed
@given(data=st.data(), kind=st.sampled_from(sorted(LOADERS)))
def test_a_shipped_file_with_its_bytes_damaged(data: st.DataObject, kind: str, tmp_path: Path) -> None:
    content = bytearray(data.draw(st.sampled_from(SHIPPED[kind])).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    path = tmp_path / "file.yaml"
    path.write_bytes(content)
    check(kind, path)


@fuzzed
@given(
    key=st.text(max_size=20) | st.sampled_from(["decode.block_size", "input.path", "model", "a.b.c", ".", "mesh."]),
    value=st.text(max_size=30),
)
def test_any_override(key: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("model: m\n")
    check("runs", path, f"{key}={value}")


@pytest.mark.parametrize(
    "text", ["", "\ufeffmodel: m", "--- a\n--- b", "model: !!python/object:os.system x", "\t", "%YAML 9.9\n---\n{}"]
)
def test_documents_that_fuzzing_may_not_find(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text, encoding="utf-8")
    check("runs", path)
