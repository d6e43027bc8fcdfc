"""The data that the configurations of both critics build, in small."""

from pathlib import Path
from typing import Any

import pytest

from mmrl.config import load_run
from mmrl.vlm.data.dataset import load_tasks

CONFIGS = Path(__file__).parents[3] / "configs/vlm"
NAMES = ("critic_sft", "critic_grpo", "critic_reading_grpo", "critique_sft", "critique_dpo")


def shrink(options: dict[str, Any], folder: Path, model: Path) -> dict[str, Any]:
    """The same options with a few rows, files in a folder of the test, and a model that exists."""
    small: dict[str, Any] = {}
    for key, value in options.items():
        small[key] = shrink(value, folder, model) if isinstance(value, dict) else value
    if "path" in small:
        small["path"] = str(folder / Path(small["path"]).name)
    if "count" in small:
        small["count"] = 6
    if "model" in small:
        small |= {"model": str(model), "max_new_tokens": 3, "judge": "tests.vlm.critic.test_critiques:by_length"}
    return small


@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_is_built_and_read(name, tmp_path, tiny_folders):
    _, config = load_run(CONFIGS / f"{name}.yaml")
    for data in (config.data, *config.eval_data.values()):
        data.path = str(tmp_path / Path(data.path).name)
        data.build_options = shrink(data.build_options, tmp_path, tiny_folders["qwen2_5_vl"])
        tasks = load_tasks(data).tasks
        assert tasks
        assert all(len(task.load_images()) == 1 for task in tasks)
        if "answer" in tasks[0].columns:
            assert all(task.columns["answer"] for task in tasks)
