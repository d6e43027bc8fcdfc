"""Questions about videos through every stage of a run: rollout, update, masked views, evaluation and report."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mmrl.recipes import RECIPES
from mmrl.runs.records import read_samples
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.run import train
from mmrl.training.trainer import collect_metrics
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.data.task import frame_strips, load_videos
from mmrl.vlm.methods.apo import ApoConfig
from mmrl.vlm.methods.papo import PapoConfig
from mmrl.vlm.methods.sft import SftConfig
from mmrl.vlm.vlm_config import VlmConfig
from tests.hub.numbered_clips import even_times, write_clip
from tests.rounding import assert_equal_up_to_rounding, assert_same_gradient
from tests.vlm.builders import draw, make_task, video_task
from tests.vlm.runs import run_config
from tests.vlm.test_shared_prefix import backward, load, ragged, weights

pytest.importorskip("av", reason="needs pip install 'mmrl-suite[vlm]'")

CONFIGS = {"vlm": VlmConfig, "papo": PapoConfig, "apo": ApoConfig, "sft": SftConfig}


def write_video_questions(folder: Path, count: int = 4, faulty: bool = False) -> Path:
    """Questions on clips; the last clip is truncated if `faulty`."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).integers(0, 256, (count, 12, 56, 56, 3), dtype=np.uint8)
    rows = []
    for index in range(count):
        clip = noise[index]
        path = write_clip(
            folder / f"{index}.mp4", even_times(12), frame=clip.__getitem__, options={"movflags": "faststart"}
        )
        if faulty and index == count - 1:
            path.write_bytes(path.read_bytes()[:-2000])
        rows.append(
            {
                "id": f"v{index}",
                "problem": "<video>What is 3 plus 4?",
                "answer": str(index),
                "videos": [{"path": path.name, "nframes": 4}],
                "completion": f"<think>3 4</think><answer>{index}</answer>",
            }
        )
    file = folder / "clips.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def video_run(name: str, folder: Path, model: Path, **options):
    """A two-step run on clips."""
    faulty = options.pop("faulty", False)
    if name == "sft":
        options["samples_per_task"] = 1
    config = run_config(CONFIGS[name], folder, model, **{"tasks_per_step": 2, **options})
    config.data = dataclasses.replace(config.data, path=str(write_video_questions(folder / "clips", faulty=faulty)))
    config.data.video.min_pixels = config.data.video.max_pixels = 64 * 64
    config.eval_data = {"heldout": dataclasses.replace(config.data, max_tasks=2)}
    config.validate()
    return config


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("papo", "qwen2_5_vl"),
        *[
            pytest.param(name, family, marks=pytest.mark.slow)
            for name in CONFIGS
            for family in ("qwen2_5_vl", "qwen3_vl")
            if (name, family) != ("papo", "qwen2_5_vl")
        ],
    ],
)
def test_two_steps_on_videos(tmp_path, tiny_folders, name, family):
    config = video_run(name, tmp_path, tiny_folders[family])
    run_dir = train(RECIPES[name], config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["loss/total"] is not None for row in rows)
    if name != "sft":
        assert rows[0]["policy/ratio_mean"] == pytest.approx(1.0)
    if name == "papo":
        assert rows[0]["papo/kl_masked"] > 0
    (kept, *_) = read_samples(run_dir, 2, "train")
    assert kept.images[-1].size == (4 * 112, 128)  # the four frames with their times
    assert (run_dir / "report.html").stat().st_size > 10_000


def test_a_clip_of_an_unknown_codec_is_skipped_and_counted(tmp_path, tiny_folders, closing):
    config = video_run("vlm", tmp_path, tiny_folders["qwen2_5_vl"], tasks_per_step=4)
    path = tmp_path / "clips/3.mp4"
    content = path.read_bytes()
    place = content.index(b"avc1", content.index(b"stsd"))
    path.write_bytes(content[:place] + b"zzzz" + content[place + 4 :])
    config.data.on_bad_row, config.eval_data = "skip", {}
    recipe = closing(RECIPES["vlm"].load_recipe_class()(config))
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks, Streams(0), Step())
    assert rollouts.num_groups == 3
    assert recipe.skipped == {"unreadable_video": 1}


def test_a_clip_that_ends_early_is_skipped_and_counted(tmp_path, tiny_folders, closing):
    config = video_run("vlm", tmp_path, tiny_folders["qwen2_5_vl"], faulty=True, tasks_per_step=4)
    config.eval_data = {}
    recipe = closing(RECIPES["vlm"].load_recipe_class()(config))
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks, Streams(0), Step())
    assert rollouts.num_groups == 3
    assert recipe.skipped == {"truncated_video": 1}
    scored = recipe.score(rollouts, Step())
    assert [task.id for task in VlmPayload.of(scored).tasks] == ["v0", "v1", "v2"]
    assert collect_metrics(recipe, scored, Step())["data/skipped"] == 1.0


def test_frames_of_the_report_have_their_times():
    frames = torch.arange(40).reshape(40, 1, 1, 1).expand(40, 3, 28, 28).float() * 6
    strips = frame_strips((frames, {"fps": 8.0, "frames_indices": list(range(40))}))
    assert [strip.size for strip in strips] == [(448, 128)] * 4  # sixteen of the forty, spread evenly
    middles = [strip.getpixel((56 + 112 * place, 56))[0] for strip in strips for place in range(4)]
    assert middles[0] == 0
    assert middles[-1] == 39 * 6
    assert middles == sorted(middles)
    captions = [np.asarray(strip)[112:].max() for strip in strips]
    assert min(captions) > 200
    (short,) = frame_strips((frames[:2], {"fps": 8.0, "frames_indices": [0, 8]}))
    assert short.size == (224, 128)


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    noise = np.random.default_rng(1).integers(0, 256, (12, 56, 84, 3), dtype=np.uint8)
    return write_clip(tmp_path_factory.mktemp("clips") / "a.mp4", even_times(12), frame=noise.__getitem__)


def test_a_video_is_computed_once_for_its_group(clip, family, folder):
    """Log-probs and all gradients are those of rows with a video each, and the tower sees each video once."""
    tasks = [video_task("v", "Sum?", clip, images=1), make_task("i", "Sum?", [(64, 96)]), video_task("w", "1", clip)]
    shared, flat = load(folder), load(folder, shared_prefix=False)
    rollouts = ragged(draw(shared, tasks, group=4, temperature=3.0))
    patches = []
    hook = shared.network.model.visual.register_forward_hook(lambda _, inputs, __: patches.append(len(inputs[0])))
    logp, gradient = backward(shared, [(rollouts, weights(rollouts))])
    hook.remove()
    prompts = VlmPayload.of(rollouts).prompts
    media = [prompt.media.get(name, ()) for prompt in prompts for name in ("pixel_values", "pixel_values_videos")]
    assert sum(patches) == sum(map(len, media))
    expected_logp, expected = backward(flat, [(rollouts, weights(rollouts))])
    assert_equal_up_to_rounding(logp, expected_logp)
    assert_same_gradient(gradient, expected)
    other = load(folder)
    frames, metadata = load_videos(tasks[2], other.layout.patch_size)[0]
    payload = VlmPayload.of(rollouts)
    changed = [*payload.prompts[:2], other.encode(tasks[2], videos=[(255 - frames, metadata)])]
    negative = rollouts.replace(payload=dataclasses.replace(payload, prompts=changed))
    logp_negative, _ = backward(other, [(negative, weights(negative))])
    assert (logp_negative - logp)[8:].abs().max() > 0.01  # the frames matter


def test_a_video_is_sampled_from_as_it_is_scored(clip, family, folder):
    policy = load(folder).eval()
    rollouts = draw(policy, [video_task("v", "Sum?", clip), make_task("i", "Sum?", [(64, 96)])], group=3)
    with torch.no_grad():
        assert_equal_up_to_rounding(policy(rollouts).logp, rollouts.logp_old)
