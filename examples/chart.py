"""Draw tokens per pass over k from a sweep's results: python examples/chart.py [FOLDER]

Without a folder a small sweep is decoded first, into outputs/example_chart. `lopa report FOLDER` draws more.
"""

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path("outputs/example_chart")
SWEEP = ["evaluate", "--profile", "cpu", "demo", "lookahead_curve", "--set", "input.limit=2"]


def main(folder: Path = FOLDER) -> None:
    if not (folder / "sweep.json").exists():
        command = [sys.executable, "-m", "common.commands", *SWEEP, "--set", f"output.path={folder}.jsonl"]
        subprocess.run(command, check=True)
    rows = json.loads((folder / "sweep.json").read_text())["rows"]
    done = [row for row in rows if row["status"] == "done"]
    for row in done:
        tpf = row["metrics"]["tpf"]["effective"]["per_request_mean"]
        accuracy = row["metrics"]["accuracy"]
        right = f"{accuracy['correct']} of {accuracy['scored']} right"
        print(f"{row['name']:24} {'#' * round(3 * tpf)} {tpf:.2f} tokens a pass, {right}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
