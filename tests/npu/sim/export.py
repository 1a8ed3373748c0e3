"""Lower a module to Ascend's GE graph, as torchair does for its compiler, and read what came out."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sim import ge


class Node(NamedTuple):
    op: str
    name: str
    inputs: tuple[str, ...]


def ge_graph(module: torch.nn.Module, *args: Any) -> list[Node]:
    """The operators in order, without constants and inputs."""
    torchair = load_torchair()
    with tempfile.TemporaryDirectory() as folder:
        torchair.dynamo_export(*args, model=module, export_path=folder, export_name="module", dynamic=False)
        text = (Path(folder) / "dynamo.pbtxt").read_text()
    nodes = [_node(part) for part in re.split(r"^node \{", text, flags=re.MULTILINE)[1:]]
    return [node for node in nodes if node.op not in ("Const", "Data")]


def load_torchair() -> Any:
    """Load torchair; call this also before npugraph_ex compiles for the first time in this process: both define the
    same, and after npugraph_ex torchair cannot be loaded."""
    torchair = import_module("torchair")
    ge.install()
    utils = import_module("torchair._utils")
    utils.add_npu_patch(utils.get_npu_default_decompositions(), torchair.CompilerConfig())
    return torchair


def histogram(nodes: list[Node]) -> Counter[str]:
    return Counter(node.op for node in nodes)


def sources(nodes: list[Node], op: str) -> list[str]:
    """Operators that feed the operators of this kind; inputs and constants by their names."""
    op_of = {node.name: node.op for node in nodes}
    names = [name.split(":")[0] for node in nodes if node.op == op for name in node.inputs if name]
    return [op_of.get(name, name) for name in names]


def _node(text: str) -> Node:
    op, name = (re.search(rf'^ +{key}: "(.*)"$', text, re.MULTILINE) for key in ("op", "name"))
    assert op is not None and name is not None
    return Node(op.group(1), name.group(1), tuple(re.findall(r'^ +input: "(.*)"$', text, re.MULTILINE)))
