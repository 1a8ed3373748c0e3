"""Write the held-out problems: PYTHONPATH=scripts/lab python -m demo_problems [folder] [--plain]"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .dataset import held_out_code, held_out_math, held_out_new_templates


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("models/demo"))
    parser.add_argument("--plain", action="store_true", help="of the second model, whose answers have one phrasing")
    known = parser.parse_args()
    known.folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(known.folder / "heldout_math.jsonl", held_out_math(700, known.plain))
    write_jsonl(known.folder / "heldout_code.jsonl", held_out_code(300, known.plain))
    if not known.plain:
        write_jsonl(known.folder / "heldout_new_templates.jsonl", held_out_new_templates(200))


if __name__ == "__main__":
    main()
