"""Runs that edit an image: its rewards, its samples, its embeddings and the rows that are refused."""

import json
import logging

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.data.prompts import PromptConfig, load_prompts
from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig
from diffusion.rewards.editing import kept
from mmrl.errors import UserError
from mmrl.rewards import RewardConfig
from tests.diffusion.edits import picture, reference, write_edits
from tests.diffusion.families.cases import CASES
from tests.diffusion.runs import PROMPTS, build, make_trainer, run_config, with_function

SIZE = (32, 24)


@pytest.fixture(scope="module")
def kontext(tmp_path_factory):
    return CASES["kontext"].build(tmp_path_factory.mktemp("editing") / "kontext")


def editing(folder, path, **trainer):
    """A run of the tiny Kontext on images of another size than its own."""
    config = run_config("flow_grpo", folder, samples_per_task=2, **trainer)
    lora, case = DiffusionLora(rank=2, alpha=4), CASES["kontext"]
    config.model = PipelineConfig(path=str(path), lora=lora, height=SIZE[0], width=SIZE[1], **case.model)
    config.data.path = str(write_edits(folder / "edits.jsonl", PROMPTS, (50, 40)))
    config.eval_data["held_out"].path = config.data.path
    config.rewards = [RewardConfig(name="kept")]
    config.sampler.guidance = 1.0
    return config


def test_rewards_see_the_reference_and_samples_show_it(kontext, tmp_path, closing):
    config = editing(tmp_path, kontext)
    seen = []

    def watched(prompts, completions, reference):
        seen.extend(zip(prompts, reference, strict=True))
        return [float(image.mean()) for image in completions]

    config.rewards = [RewardConfig(name="kept"), RewardConfig(name="caption_colour")]
    trainer = make_trainer(config, tmp_path)
    recipe = closing(trainer.recipe)
    with_function(recipe, {"kept": kept, "caption_colour": watched, "jpeg_incompressibility": watched})
    rollouts, _ = trainer.collect()
    own = {task.prompt: task.image.pixels(*SIZE) for task in recipe.train_tasks}
    assert len(seen) == 2 * rollouts.num_rows
    assert all(np.array_equal(image, own[prompt]) for prompt, image in seen)
    for row, record in enumerate(recipe.records(rollouts, 4)):
        left, right = np.split(np.asarray(record.outputs[0]), 2, axis=1)
        assert np.array_equal(left, own[record.prompt])
        assert np.array_equal(right, rollouts.payload.images[row])
        assert record.terms["kept"] == pytest.approx(kept([""], [right], reference=[left])[0])


def test_prompts_with_an_image_are_embedded_once_and_outlive_their_encoders(kontext, tmp_path):
    config = editing(tmp_path, kontext)
    config.model.free_text_encoders = True
    rows = [{"prompt": PROMPTS[0], "image": f"{number}.png"} for number in (0, 1, 0)]
    (tmp_path / "edits.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trainer = make_trainer(config, tmp_path)
    embeddings = trainer.policy.embeddings
    images = [task.image for task in trainer.recipe.train_tasks]
    found = embeddings.rows([PROMPTS[0]] * 3, images=images)
    assert found.index.tolist() == [0, 1, 0]
    assert not torch.equal(found.values["reference"][0], found.values["reference"][1])
    assert embeddings.encoded == 3  # two images of one prompt, and the negative one
    trainer.train_step()
    assert trainer.updater.optimiser_step > 0
    trainer.recipe.close()


def test_an_image_covers_the_size_of_the_run():
    wide = np.zeros((10, 40, 3), np.uint8)
    wide[:, 15:25] = 255  # the middle, which is kept
    found = reference(Image.fromarray(wide)).pixels(20, 20)
    assert found.shape == (20, 20, 3)
    assert found.mean() > 240
    same = picture(8, 6)
    assert np.array_equal(reference(same).pixels(8, 6), np.asarray(same))


def test_rows_whose_image_cannot_be_used_are_left_out_or_named(tmp_path, caplog):
    picture(8, 6).save(tmp_path / "good.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "good.png").read_bytes()[:60])
    (tmp_path / "text.png").write_text("no image")
    cells = ["good.png", "gone.png", "broken.png", "text.png", 7, None]
    path = tmp_path / "edits.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "make it red", "image": cell}) for cell in cells))
    with caplog.at_level(logging.WARNING):
        loaded = load_prompts(PromptConfig(path=str(path)))
    assert [task.image is not None for task in loaded.tasks] == [True, False]
    assert loaded.tasks[0].columns == {}
    assert loaded.skipped == {"image": 4}
    assert "line 2: the image of column 'image' cannot be used: file not found: " in caplog.text
    named = {2: "file not found", 3: "Error", 4: "not an image;", 5: "not int"}
    for line, reason in named.items():
        path.write_text("\n" * (line - 1) + json.dumps({"prompt": "make it red", "image": cells[line - 1]}))
        with pytest.raises(UserError, match=rf"edits\.jsonl line {line}: the image of column 'image' .*{reason}"):
            load_prompts(PromptConfig(path=str(path), on_bad_row="error"))
    path.write_text(json.dumps({"prompt": "make it red", "image": "gone.png"}))
    assert load_prompts(PromptConfig(path=str(path), image_key="")).tasks[0].columns == {"image": "gone.png"}


def test_images_that_the_family_or_other_rows_do_not_have_are_refused(kontext, tmp_path):
    config = run_config("flow_grpo", tmp_path)
    config.data.path = str(write_edits(tmp_path / "edits.jsonl", PROMPTS, SIZE))
    with pytest.raises(UserError, match=r"line 1 has an image, but StableDiffusion3Pipeline does not take images"):
        build(config)
    config = editing(tmp_path, kontext)
    with (tmp_path / "edits.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"prompt": "a red circle"}))
    with pytest.raises(UserError, match=r"data: edits\.jsonl line 4 has no image, but edits\.jsonl line 1 has one"):
        build(config)
    write_edits(tmp_path / "edits.jsonl", PROMPTS, SIZE)
    config.data.image_key = config.eval_data["held_out"].image_key = ""
    with pytest.raises(UserError, match="reward 'kept' needs reference"):
        build(config)


def test_kept_counts_what_lies_outside_of_the_box():
    before = np.zeros((4, 8, 3), np.uint8)
    image = before.copy()
    image[:, :4] = 255
    assert kept([""], [image], reference=[before]) == [0.5]
    assert kept([""] * 2, [image] * 2, reference=[before] * 2, box=[[0, 0, 0.5, 1], None]) == [1.0, 0.5]
    for box, reason in (([0, 0, 1, 1], "covers the whole"), ([0.5, 0, 0.2, 1], "must be left, top"), ([1], "must be")):
        with pytest.raises(ValueError, match=reason):
            kept([""], [image], reference=[before], box=[box])
