"""What CANN says in the errors that torch-npu raises.

The first line of such an error names a C++ function and a file of torch-npu's build. Below it stand CANN's own sentence
after a code (`EJ0003: [PID: 1] 2026-.. Failed`, or `.. Communication_Error_Bind_IP_Port(EI0019): Failed`), and after
`[Error]:` torch-npu's text for the number (NPU_CHECK_ERROR, torch_npu/csrc/core/npu/NPUException.h of Ascend/pytorch).
"""

from __future__ import annotations

import re

_CODED = re.compile(r"\b(E[A-Z]\d{4})\b[\s):]*(?:\[PID: \d+\])?[\s\d:.-]*(?:\(\1\):)?(.*)")
_SAYS_NOTHING = ("", "Inner Error!")
_NUMBERED = re.compile(r"\[Error\]: *(\S.*)")


def said_by_cann(error: BaseException) -> str | None:
    """Return CANN's sentence with its code, or torch-npu's for the number; None: there is neither."""
    coded = ((found[1], found[2].strip()) for found in map(_CODED.search, str(error).splitlines()) if found)
    said = next((f"{code}: {sentence}" for code, sentence in coded if sentence not in _SAYS_NOTHING), None)
    if said is not None:
        return said
    numbered = _NUMBERED.search(str(error))
    return numbered[1].strip() if numbered else None


def told(error: BaseException) -> str:
    """Return an error as part of a sentence: its first line, after what CANN says if it does."""
    first = (str(error).strip() or repr(error)).splitlines()[0]
    said = said_by_cann(error)
    return first if said is None or said in first else f"{said} ({first})"
