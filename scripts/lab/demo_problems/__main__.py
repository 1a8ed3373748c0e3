"""Write the held-out problems: PYTHONPATH=scripts/lab python -m demo_problems [folder]"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .dataset import held_out_code, held_out_math, held_out_new_templates


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "models/demo")
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "heldout_math.jsonl", held_out_math(700))
    write_jsonl(folder / "heldout_code.jsonl", held_out_code(300))
    write_jsonl(folder / "heldout_new_templates.jsonl", held_out_new_templates(200))


if __name__ == "__main__":
    main()
