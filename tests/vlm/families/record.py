"""Test results of each model family, kept in record.json; docs/vlm.md has them as a table.

    python -m tests.vlm.families.record    # runs the tests, the slow ones too, and writes the record if all pass

The tests compare what they find with the record, so that a table that is no longer true fails.
"""

import hashlib
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("record.json")
TESTS = ("test_generic.py", "test_trained.py")
CHECKS = {"scores": {"logp", "gradient"}, "full": {"logits"}, "lora": {"transformers", "peft"}}
"""Numbers of each check that every family passes: largest differences, of gradients relative to their norm."""
NEW = "FAMILIES_RECORD"
"""Variable that names the file of a record in the making."""


def note(kind: str, check: str, **differences: float) -> None:
    """Compare what a test that passed has found of a family with the record, or write it into a new one."""
    from tests.vlm.families.zoo import ZOO

    found = {name: _rounded_up(value) for name, value in differences.items()}
    head = {"name": ZOO[kind].released, "configuration": digest(kind)}
    if NEW in os.environ:
        file = Path(os.environ[NEW])
        record = json.loads(file.read_text(encoding="utf-8"))
        record["families"].setdefault(kind, head)[check] = found
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return
    known = read_record()["families"][kind]
    assert head.items() <= known.items(), "another configuration; run `python -m tests.vlm.families.record`"
    # other CPUs round differently, so only the kinds of number are the same
    assert found.keys() == known[check].keys()


def read_record() -> dict[str, Any]:
    """Families by `model_type`, and the versions with which they were tried."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def digest(kind: str) -> str:
    """Changes with the configuration of a family's tiny model."""
    from tests.vlm.families.zoo import ZOO

    return hashlib.sha256(json.dumps(ZOO[kind].options, sort_keys=True).encode()).hexdigest()[:12]


def _rounded_up(value: float) -> float:
    """To one digit."""
    if value == 0:
        return 0.0
    step = 10.0 ** math.floor(math.log10(value))
    return float(f"{math.ceil(value / step) * step:.0e}")


def main() -> int:
    """Run the tests and replace the record if all pass."""
    from importlib.metadata import version

    import pytest

    folder = Path(__file__).parent
    with tempfile.TemporaryDirectory() as scratch:
        new = Path(scratch) / FILE.name
        versions = {name: version(name) for name in ("torch", "transformers", "peft")}
        new.write_text(json.dumps({"versions": versions, "families": {}}), encoding="utf-8")
        os.environ[NEW] = str(new)
        code = pytest.main(["-m", "", "-p", "no:cacheprovider", "--maxfail=6", *(str(folder / name) for name in TESTS)])
        if code == 0:
            FILE.write_bytes(new.read_bytes())
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
