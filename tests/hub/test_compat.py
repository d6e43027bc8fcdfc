import importlib
import sys

import pytest
import torch

from mmrl.errors import UserError
from mmrl.hub import compat


@pytest.fixture
def imports(monkeypatch):
    """Let `import torchvision` fail with the given errors, one after another, and then succeed."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torchvision"}

    def fail_with(*errors: Exception) -> None:
        waiting = list(errors)

        def import_module(name: str):
            assert name == "torchvision"
            sys.modules["torchvision.halfway"] = object()
            if waiting:
                raise waiting.pop(0)

        monkeypatch.setattr(importlib, "import_module", import_module)

    yield fail_with
    sys.modules.pop("torchvision.halfway", None)
    sys.modules.update(kept)


def missing(name: str) -> RuntimeError:
    return RuntimeError(f"operator torchvision::{name} does not exist")


def ensure() -> str:
    compat._DECLARED.clear()
    return compat.ensure_torchvision.__wrapped__()


def test_this_machine_has_a_known_state():
    assert compat.ensure_torchvision() in compat.TORCHVISION_STATES


def test_native_import_is_left_alone(imports):
    imports()
    assert ensure() == "native"


def test_missing_operators_are_declared_and_the_import_is_tried_again(imports):
    imports(missing("suite_test_a"), missing("suite_test_b"))
    assert ensure() == "patched"
    for name in ("suite_test_a", "suite_test_b"):
        schema = getattr(torch.ops.torchvision, name).default._schema
        assert len(schema.arguments) == 3


def test_half_imported_modules_are_forgotten_before_the_next_try(imports):
    imports(missing("suite_test_c"))
    sys.modules["torchvision.stale"] = object()
    ensure()
    assert "torchvision.stale" not in sys.modules


def test_absent(imports):
    imports(ModuleNotFoundError("No module named 'torchvision'", name="torchvision"))
    assert ensure() == "absent"


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ([OSError("libcudart.so.13: cannot open shared object file")], "whl/cpu torchvision"),
        ([ImportError("cannot import name 'x'")], "whl/cpu torchvision"),
        ([RuntimeError("something else")], "whl/cpu torchvision"),
        ([ModuleNotFoundError("No module named 'PIL'", name="PIL")], "PIL"),
        ([missing(f"suite_test_many_{index}") for index in range(40)], "more than 16"),
    ],
)
def test_other_failures_say_what_to_install_or_what_is_missing(imports, errors, message):
    imports(*errors)
    with pytest.raises(UserError, match=message):
        ensure()


def test_progress_bars_are_restored():
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    with compat.quiet_transformers():
        assert not logging.is_progress_bar_enabled()
    assert logging.is_progress_bar_enabled() == before


def test_numbers_are_written_as_num2words_writes_them():
    """The expected words are those of num2words 0.5.14, with which all of 0 to 999 agree."""
    written = [compat.number_words(number) for number in (0, 8, 19, 20, 64, 100, 128, 711, 999, 1200)]
    expected = ["zero", "eight", "nineteen", "twenty", "sixty-four", "one hundred", "one hundred and twenty-eight"]
    assert written == [*expected, "seven hundred and eleven", "nine hundred and ninety-nine", "1200"]
