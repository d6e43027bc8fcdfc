import os

import pytest

from tests.chat_server import running_chat_server

# Some virtual machines announce AMX instructions and then refuse them, which ends the process at the first bfloat16
# product; oneDNN reads this before its first use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@pytest.fixture
def chat_server():
    """A chat endpoint with `url`, `requests` and `answers`."""
    with running_chat_server() as server:
        yield server
