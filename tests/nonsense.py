"""Files as an attacker or a bad disk would leave them: hypothesis strategies that damage trees, bytes and headers."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

_SCALARS = (
    *(None, True, False, 0, 1, -1, 2, 3, 4.5, -0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")),
    *(2**31, 2**31 + 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(2**63)),
    *("", "0", "default", "true", "a\nb", "\ud800", "\x00", "\u2028", "../x", "/etc/passwd", "x" * 5000, "a.b.c", "٣"),
)
_DEEP_LIST, _DEEP_DICT = json.loads("[" * 200 + "]" * 200), json.loads('{"a":' * 200 + "1" + "}" * 200)
_LARGE: tuple[Any, ...] = (
    [],
    {},
    [[]],
    {"": None},
    [0] * 1000,
    {str(n): n for n in range(1000)},
    _DEEP_LIST,
    _DEEP_DICT,
)
scalars = st.sampled_from(_SCALARS) | st.integers() | st.floats() | st.text(max_size=20)
_large = st.sampled_from(_LARGE).map(copy.deepcopy)  # damage goes on inside
values = scalars | _large | st.lists(scalars, max_size=4) | st.dictionaries(st.text(), scalars)
_FRAGMENTS = (
    *(b"", b"\x00", b"\xff\xfe", b"\xe9", b"[" * 5000, b'{"":' * 5000, b'"', b"\\", b"\\ud800", b"1e400", b"9" * 5000),
    *(b"NaN", b"-Infinity", b"null", b"{}", b"[]", b",", b"\n", b'{"a":1,"a":2}', b"\xef\xbb\xbf", b" " * 5000),
)


@st.composite
def damaged_tree(draw: st.DrawFn, tree: Any, most: int = 3) -> Any:
    """The tree with some of its values replaced, removed, doubled or swapped."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, most))):
        places = list(_places(tree))
        if not places:
            return draw(values)
        node, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(("replace", "replace", "remove", "swap", "add"))):
            case "replace":
                node[key] = draw(values)
            case "remove":
                del node[key]
            case "swap":
                other, its_key = draw(st.sampled_from(places))
                node[key], other[its_key] = copy.deepcopy(other[its_key]), copy.deepcopy(node[key])
            case "add" if isinstance(node, dict):
                node[draw(st.text(max_size=20) | st.just("a\nb" * 200))] = draw(values)
            case "add":
                node.append(draw(values))
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every value below the root, as its container and the key there."""
    if isinstance(tree, (dict, list)):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key])


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes, most: int = 3) -> bytes:
    """The bytes with some stretches replaced, or cut off."""
    for _ in range(draw(st.integers(1, most))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from((0, 1, 2, 8, 100, 10**9))))
        data = data[:start] + draw(st.sampled_from(_FRAGMENTS) | st.binary(max_size=8)) + data[end:]
    return data


@st.composite
def damaged_safetensors(draw: st.DrawFn, data: bytes) -> bytes:
    """A safetensors file whose header, length of the header, or tensors are not those it had."""
    size = int.from_bytes(data[:8], "little")
    header, tensors = json.loads(data[8 : 8 + size]), data[8 + size :]
    match draw(st.sampled_from(("tree", "field", "text", "length", "tensors", "bytes"))):
        case "tree":
            header = draw(damaged_tree(header))
        case "field":
            entry = header[draw(st.sampled_from([name for name in header if name != "__metadata__"]))]
            sizes = st.sampled_from((0, 1, 2, 3, 8, 2**31, 2**32, 2**62, 2**63, 2**64, -1, 1.5)) | st.integers(0, 99)
            field = draw(st.sampled_from(("dtype", "shape", "data_offsets")))
            entry[field] = draw(st.sampled_from(_DTYPES) if field == "dtype" else st.lists(sizes, max_size=4))
        case "tensors":
            tensors = draw(damaged_bytes(tensors))
        case "bytes":
            return draw(damaged_bytes(data))
        case "length":
            lengths = st.sampled_from((0, 1, 7, 8, size - 1, size + 1, 10**8, 2**31, 2**63, 2**64 - 1))
            return draw(lengths).to_bytes(8, "little") + data[8:]
        case "text":
            text = draw(damaged_bytes(data[8 : 8 + size]))
            return len(text).to_bytes(8, "little") + text + tensors
    text = to_bytes(header)
    return len(text).to_bytes(8, "little") + text + tensors


_DTYPES = (
    *("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64", "BOOL", "C64", "F8_E4M3"),
    *("F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F8_E4M3FNUZ", "", "X", 5, None),
)


def to_bytes(tree: Any) -> bytes:
    return json.dumps(tree).encode()
