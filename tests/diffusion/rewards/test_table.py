import inspect
import subprocess
import sys

import numpy as np
import pytest

from diffusion.rewards import IMAGE_REWARDS, load_image_rewards
from diffusion.rewards.image_rewards import COLUMNS
from diffusion.toy.shapes import all_scenes, render_dataset
from mmrl.errors import UserError
from mmrl.rewards import RewardConfig, RewardSum

WITHOUT_OPTIONS = [
    name for name, reward in IMAGE_REWARDS.items() if reward.offline and name not in ("ocr", "shapes_judge")
]


@pytest.mark.parametrize("name", list(IMAGE_REWARDS))
def test_every_row_has_a_function_with_rows_and_columns(name):
    reward = IMAGE_REWARDS[name]
    assert reward.name == name
    signature = inspect.signature(reward.load())
    assert list(signature.parameters)[:2] == ["prompts", "completions"]
    assert signature.parameters["_"].kind is inspect.Parameter.VAR_KEYWORD
    assert reward.summary
    assert reward.citation
    needs_options = any(
        parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        for parameter in signature.parameters.values()
        if parameter.name not in COLUMNS
    )
    assert needs_options == ("option" in reward.needs)


@pytest.mark.parametrize("name", WITHOUT_OPTIONS)
def test_values_lie_in_the_range_of_the_table(name):
    scenes = all_scenes(["single", "position"])
    images = list(render_dataset(scenes, 40, seed=0)[0])
    images += list(np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8))
    if IMAGE_REWARDS[name].video:
        images = [np.stack([image, image[::-1]]) for image in images]
    digits = name.startswith(("class", "moving"))
    prompts = [f"a {row % 10}" if digits else scenes[row % len(scenes)].caption for row in range(len(images))]
    if name.startswith("word"):
        prompts = [f'the word "{("cat", "fox")[row % 2]}"' for row in range(len(images))]
    if name.startswith("mo"):
        prompts = [f"{prompt} moving down" for prompt in prompts]
    reward = load_image_rewards([name])[name]
    columns = {"reference": images[::-1]} if "reference" in inspect.signature(reward).parameters else {}
    values = [value for value in reward(prompts, images, **columns) if value is not None]
    low, high = IMAGE_REWARDS[name].range
    assert len(set(values)) > 1
    assert low is None or min(values) >= low
    assert high is None or max(values) <= high


def test_reward_sum_takes_functions_and_options_of_both_tables():
    functions = load_image_rewards(
        ["jpeg_compressibility", "shapes_geneval"], {"jpeg_compressibility": {"scale": "flow_grpo"}}
    )
    configs = [
        RewardConfig("shapes_geneval", options={"strict": True}),
        RewardConfig("jpeg_compressibility", weight=0.0),
        RewardConfig("jpeg_ddpo", function="jpeg_compressibility", weight=0.0, options={"scale": "ddpo"}),
    ]
    images, index = render_dataset(all_scenes(["single"]), 5, seed=0)
    prompts = [all_scenes(["single"])[scene].caption for scene in index]
    result = RewardSum(configs, functions).score(prompts, list(images), {"kind": ["single"] * 5})
    assert result.total == [1.0] * 5
    large, small = (np.asarray(result.terms[name]) for name in ("jpeg_ddpo", "jpeg_compressibility"))
    assert large == pytest.approx(500 * small)


def test_an_option_that_is_missing_everywhere_is_found_before_the_run():
    functions = load_image_rewards(["pickscore"])
    rewards = RewardSum([RewardConfig("pickscore")], functions)
    with pytest.raises(UserError, match="'pickscore' needs path"):
        rewards.check_columns(["metadata"])


@pytest.mark.parametrize(
    ("names", "options", "culprit"),
    [
        (["shapes_genevall"], {}, "did you mean 'shapes_geneval'"),
        (["beauty"], {}, "unknown image reward 'beauty'; .*known: .*aesthetic"),
        (["ocr"], {"orc": {}}, "unknown image reward 'orc'; did you mean 'ocr'"),
        (["jpeg_compressibility"], {"jpeg_compressibility": {"scal": "ddpo"}}, "did you mean 'scale'"),
        (["jpeg_compressibility"], {"jpeg_compressibility": {"scale": "dance"}}, "'dance'; use one of"),
        (["pickscore"], {"pickscore": {"path": "/nowhere"}}, "weights not found at /nowhere"),
        (["shapes_geneval"], {"shapes_geneval": {"metadata": []}}, "no option 'metadata'"),
        (["ocr"], {"ocr": {"program": "no-such-reader"}}, "needs the program"),
        (["ocr"], {"ocr": {"program": "tesseract", "layout": 6}}, "'ocr' has no option 'layout'"),
    ],
)
def test_mistakes_show_before_the_run(names, options, culprit):
    with pytest.raises(UserError, match=culprit):
        load_image_rewards(names, options)


def test_the_table_loads_nothing_heavy():
    heavy = ("torch", "transformers", "diffusers", "sklearn", "PIL", "numpy")
    program = f"import sys, diffusion.rewards; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
