"""Configurations say on which GPUs they run; their plans say the same."""

import re
from pathlib import Path

import pytest

from mmrl.config import load_run
from mmrl.recipes import plan_of

CONFIGS = Path(__file__).parents[1] / "configs"
SAID = re.compile(r"By its plan \(mmrl train \.\.\. --dry-run\) it fits on (\d+) GPUs? of (\d+) GB")
FILES = {path: found for path in sorted(CONFIGS.rglob("*.yaml")) if (found := SAID.search(path.read_text()))}


def test_the_files_of_3b_and_sd3_5_say_on_what_they_run():
    assert {"qwen2_5_vl_3b_papo", "sd3_5_medium_awm", "sd3_5_medium_flow_grpo", "sd3_5_medium_flow_dppo"} <= {
        path.stem for path in FILES
    }


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_configuration_fits_on_what_it_names(path):
    gpus, memory = map(int, FILES[path].groups())
    entry, config = load_run(path)
    assert plan_of(entry)(config).fits(memory, gpus)
