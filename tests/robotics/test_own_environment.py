"""A user's own Gymnasium environment and policy, as README and docs show it."""

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "robotics.md"


def test_the_example_of_the_docs_trains(tmp_path):
    text = DOCS.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", text, re.S)
    assert [name for name, _ in blocks] == ["my_robot.py", "my_training.py"]
    for name, code in blocks:
        (tmp_path / name).write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "my_training.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "runs" / "my-robot" / "report.html").is_file()
    rows = (tmp_path / "runs" / "my-robot" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 20
