"""What a machine says it can do and cannot."""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

LOGGER = logging.getLogger("mmrl")
LIMIT = "ONEDNN_MAX_CPU_ISA"
PROBE = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"


@functools.cache
def avoid_refused_instructions() -> None:
    """Keep bfloat16 arithmetic on the CPU from ending the process.

    Some virtual machines announce AMX instructions and then refuse them. Whether this is one of them is tried in a
    process of its own, before the first product here; if so, oneDNN is set up to do without. A limit that the user has
    set stays, and machines without AMX or with a GPU are left alone.
    """
    if LIMIT in os.environ or torch.cuda.is_available() or not _announces_amx():
        return
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False)
    if probe.returncode == -signal.SIGILL:
        os.environ[LIMIT] = "AVX512_CORE_BF16"
        LOGGER.warning("this machine announces AMX instructions but refuses them; %s=%s", LIMIT, os.environ[LIMIT])


def _announces_amx() -> bool:
    file = Path("/proc/cpuinfo")
    return file.is_file() and "amx_bf16" in file.read_text(encoding="utf-8", errors="replace")
