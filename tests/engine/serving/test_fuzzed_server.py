"""Whatever a client sends is answered soon, with 2xx or 4xx, and without much memory.

LOPA_FUZZ_SECONDS=300 gives each of the two tests five minutes instead of seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.serving.served import ROOT, Served
from tests.engine.serving.storms import children_of, resident_kib
from tests.fuzzing import SECONDS, fuzzed

pytestmark = pytest.mark.slow
_SLOWEST_S = 2.0
_LARGEST_KIB = 2**20
_LONGEST = 6_000_000  # bytes of a body: more than are taken
_CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,refused_soon"
# Short answers: how long a decode takes is not what is looked at.
_SHORT = ("--set", "max_model_len=64", "--set", "decode.max_new_tokens=16")

_PARTS = [{"type": "text", "text": "a"}]
_VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2, "stop": ["x"], "diffusion": {"num_lookahead": 0}, "n": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": _PARTS}], "max_tokens": 2},
    "/generate": {"prompt": [5, 6], "max_tokens": 2, "stream": True, "stream_mode": "denoise"},
    "/tokenize": {"prompt": "a", "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6]},
    "/abort_request": {"request_id": "a"},
}  # fmt: skip
_NAMES = st.sampled_from(
    ["prompt", "messages", "tokens", "stop", "n", "seed", "model", "temperature", "top_p", "top_k", "max_tokens",
     "max_completion_tokens", "stream", "stream_options", "diffusion", "request_id", "echo", "logprobs", "tools",
     "response_format", "role", "content", "num_lookahead", "block_size", "skip_threshold", "type", "text",
     "add_special_tokens"]
)  # fmt: skip
_ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from([-1, 0, 2**31, 2**63, 2**70, 1e-40, 1e300, float("nan"), "\ud800", "\x00", "", "<|mask|>"]),
    st.integers(1, 4400).map(lambda digits: int("9" * min(digits, 4300))),
)  # fmt: skip
_LENGTHS = st.sampled_from([0, 1, 2, 17, 300, 5_000, 100_000, 300_000])


def _deep(pair: tuple[int, Any]) -> Any:
    depth, value = pair
    for _ in range(depth):
        value = [value] if depth % 2 else {"a": value}
    return value


_VALUES = st.recursive(
    _ATOMS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES, inner, max_size=4), max_leaves=10
) | st.one_of(
    st.tuples(_LENGTHS, _ATOMS).map(lambda pair: [pair[1]] * pair[0]),
    st.tuples(_LENGTHS, _ATOMS, _ATOMS).map(lambda of: [*[of[1]] * of[0], of[2]]),
    st.tuples(_LENGTHS, st.sampled_from(["a", "é", "😀", "ab\n", '"', "a b "])).map(lambda pair: pair[0] * pair[1]),
    _LENGTHS.map(lambda count: {f"k{number}": number for number in range(min(count, 100_000))}),
    st.tuples(st.sampled_from([5, 90, 400, 900, 3000]), _ATOMS).map(_deep),
)  # fmt: skip


class Case(NamedTuple):
    route: str
    body: bytes

    def __repr__(self) -> str:
        """Short: bodies have megabytes."""
        return f"{self.route} {len(self.body)} bytes {self.body[:200]!r} ... {self.body[-50:]!r}"


@st.composite
def bodies(draw: st.DrawFn) -> Case:
    """A route, and a body of it with some fields of other types and sizes, or damaged."""
    route = draw(st.sampled_from(sorted(_VALID)))
    body: Any = {**_VALID[route], **draw(st.dictionaries(_NAMES, _VALUES, max_size=3))}
    if draw(st.integers(0, 19)) == 0:
        body = draw(_VALUES)
    try:
        data = json.dumps(body, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    except RecursionError:
        data = b"[" * 3000 + b"]" * 3000
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=9)) + data[at + draw(st.integers(0, 9)) :]
    return Case(route, data[:_LONGEST])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("fuzzed") / "log", *_SHORT) as served:
        yield served
        assert "Traceback" not in served.text
        assert len(served.text) < 2**20


def check_memory(server: Served) -> None:
    (front_end,) = children_of(server.process.pid)
    for line in Path(f"/proc/{front_end}/status").read_text().splitlines():
        if line.startswith("VmHWM"):  # the most it has ever had
            assert int(line.split()[1]) < _LARGEST_KIB, line
    assert resident_kib(server.process.pid) < _LARGEST_KIB


@fuzzed
@given(case=bodies())
def test_any_body_is_answered(case: Case, server: Served) -> None:
    route, body = case
    began = time.monotonic()
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", route, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.status == 200 or 400 <= answer.status < 500, (answer.status, text[:500])
    if answer.status != 200:
        assert time.monotonic() - began < _SLOWEST_S, text[:500]
        assert json.loads(text)["error"]["message"]
    check_memory(server)


@pytest.mark.skipif(find_spec("schemathesis") is None, reason="needs schemathesis")
def test_what_openapi_describes_is_what_is_answered(server: Served) -> None:
    num_examples = "10000" if SECONDS else "5"
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", _CHECKS,
        "--exclude-path-regex", "^/(pause|continue|update|release|resume)_",  # after which nothing else is answered
        "--no-color", "--max-time", str(int(SECONDS) or 20), "--max-examples", num_examples,
    ]  # fmt: skip
    hooks = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.engine.serving.soon", "PYTHONPATH": str(ROOT)}
    limit_s = SECONDS + 240
    done = subprocess.run(command, env=hooks, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(done.stdout[-800:])
    check_memory(server)
