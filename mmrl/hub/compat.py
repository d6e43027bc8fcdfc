"""Workarounds for the installed torchvision and transformers, applied only if needed.

Linux x86-64 wheels of torchvision on the package index are CUDA builds. Beside a CPU build of torch their
compiled operators do not load, and the Python part then stops at the first operator it wants to describe.
Declaring the schema of the missing operators is enough: nothing in this suite calls them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator

from mmrl.errors import UserError

_MISSING_OPERATOR = re.compile(r"operator (torchvision::\w+) does not exist")
_OPERATOR_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_CPU_WHEEL = "pip install --index-url https://download.pytorch.org/whl/cpu torchvision"
_MOST_OPERATORS = 16
_DECLARED: list[str] = []
_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


@functools.cache
def ensure_torchvision() -> str:
    """Make `import torchvision` work with the installed torch, once per process; returns a key of `TORCHVISION_STATES`.

    Call it before anything that imports torchvision: image processors, peft, qwen_vl_utils.
    """
    try:
        retry_with_operators(lambda: importlib.import_module("torchvision"))
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise UserError(f"torchvision is installed but requires the module {error.name}") from error
        return "absent"
    return "patched" if _DECLARED else "native"


def retry_with_operators(execute: Callable[[], object]) -> None:
    """Import torchvision with a function, retrying after declaring each missing operator."""
    for _ in range(_MOST_OPERATORS):
        try:
            execute()
        except ModuleNotFoundError:
            raise
        except (ImportError, OSError, RuntimeError) as error:
            _declare_operator(error)
        else:
            return
    raise UserError(f"torchvision lacks more than {_MOST_OPERATORS} operators; reinstall it: {_CPU_WHEEL}")


def _declare_operator(error: Exception) -> None:
    """Declare the operator that an import error names, and forget the half-imported package."""
    import torch
    from torch import library

    missing = _MISSING_OPERATOR.search(str(error))
    if missing is None:
        raise UserError(
            f"torchvision cannot be imported with torch {torch.__version__}: {error}; install the matching "
            f"release, without a GPU by: {_CPU_WHEEL}"
        ) from error
    for name in [key for key in sys.modules if key == "torchvision" or key.startswith("torchvision.")]:
        del sys.modules[name]
    library.define(missing.group(1), _OPERATOR_SCHEMA)
    _DECLARED.append(missing.group(1))


def ensure_number_words() -> None:
    """Allow SmolVLM's processor to write the length of a video in words even if the package num2words is missing.

    transformers refuses to make the processor without that package, for images too.
    """
    from transformers.models.smolvlm import processing_smolvlm

    if processing_smolvlm.num2words is None:
        processing_smolvlm.num2words = number_words


def number_words(number: int) -> str:
    """An integer from 0 to 999 in English, as num2words writes it; larger ones in digits."""
    if number < len(_SMALL):
        return _SMALL[number]
    if number < 100:
        return "-".join([_TENS[number // 10 - 2], *([_SMALL[number % 10]] if number % 10 else [])])
    if number < 1000:
        hundreds = f"{_SMALL[number // 100]} hundred"
        return f"{hundreds} and {number_words(number % 100)}" if number % 100 else hundreds
    return str(number)


LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError)
"""Errors of transformers' `from_pretrained` for a folder or hub id without such a model."""


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable the progress bars of transformers for each weight file, and a warning that precedes an error."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


TORCHVISION_STATES = {
    "native": "torchvision can be imported as installed",
    "patched": "torchvision's compiled operators cannot be loaded with this torch; their schemas are declared instead",
    "absent": "torchvision is not installed; images use Pillow, videos do not work",
}
