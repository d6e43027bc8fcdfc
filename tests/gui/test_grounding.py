"""Questions about screens: prompt, resizing, targets and dropped rows."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch
from PIL import Image

from mmrl.cli import main
from mmrl.errors import UserError
from mmrl.gui.grounding.coords import CoordinateSpace, Resize
from mmrl.gui.grounding.grounding_tasks import (
    GroundingSettings,
    Screens,
    check_held_out,
    grounding_task,
    prepare_tasks,
)
from mmrl.gui.grounding.rewards import AnswerRules
from mmrl.vlm.data.dataset import DataConfig, LoadedTasks, load_tasks
from mmrl.vlm.data.task import TaskError, VlmTask
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.model.model_config import ModelConfig
from tests.gui.screens import small_model


def screen(size=(300, 200), **columns):
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "save it"}]}]
    return VlmTask("s1", messages, [Image.new("RGB", size, "white")], columns={"bbox": [30, 20, 90, 60], **columns})


def text_of(task):
    return task.messages[-1]["content"][1]["text"]


def test_the_prompt_names_the_size_that_the_model_sees():
    task = grounding_task(screen(), GroundingSettings(), Resize(28))
    assert task.image_wh == [(308, 196)]
    assert '308 x 196 pixels. Which element is meant by "save it"?' in text_of(task)
    assert '[{"point_2d": [x, y]}, ...]' in text_of(task)
    assert task.load_images()[0].size == (308, 196)
    assert task.columns["grounding"] == {
        **{"bbox": [30, 20, 90, 60], "original_wh": [300, 200], "model_wh": (308, 196), "instruction": ""},
        **{"space": "abs_resized", "no_think": True},
    }


def test_worked_answers_are_written_in_the_models_space():
    for family, expected in (("qwen2_5_vl", "[154, 98]"), ("qwen3_vl", "[500, 500]")):
        settings = GroundingSettings(family=family)
        task = grounding_task(screen(answers=[[150, 100]]), settings, settings.resize(ModelConfig(path="")))
        assert task.columns["completion"] == f'[{{"point_2d": {expected}}}]'


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"answers": [150, 100]}, r"answers is \[150, 100\]; expected a list of points"),
        ({"answers": ["save"]}, r"answers is \['save'\]; expected a list of points"),
        ({"answers": [[150, 100]], "labels": ["a", "b"]}, r"with labels \['a', 'b'\]; expected"),
        ({"original_wh": [300]}, r"original_wh is \[300\]; expected \[width, height\]"),
        ({"original_wh": {"w": 300, "h": 200}}, "original_wh is .*; expected"),
    ],
)
def test_a_malformed_column_is_an_error_of_its_task(columns, message):
    with pytest.raises(TaskError, match=message):
        grounding_task(screen(**columns), GroundingSettings(), Resize(28))


@pytest.mark.parametrize("model_wh", [(308, 196), (300, 200)])
def test_an_answer_with_an_integer_beyond_floats_is_drawn_without_it(model_wh):
    config = SimpleNamespace(grounding=GroundingSettings(), answer=AnswerRules(), model=ModelConfig())
    needs = {"bbox": [30, 20, 90, 60], "original_wh": (300, 200), "model_wh": model_wh}
    task = screen(grounding=needs)
    far, near = f'{{"point_2d": [{"9" * 400}, 20]}}', '{"point_2d": [40, 30]}'
    drawn = [Screens(config).draw(task, f"[{', '.join(items)}]", False) for items in ([far, near], [near], [])]
    assert len({image.tobytes() for image in drawn}) == 3  # the second point keeps its rank


def test_a_think_block_is_requested_in_the_system_turn():
    task = screen()
    task.messages.insert(0, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]})
    ready = grounding_task(task, GroundingSettings(think=True, think_prompt="Think first."), Resize(28))
    assert [turn["role"] for turn in ready.messages] == ["system", "user"]
    assert ready.messages[0]["content"][0]["text"] == "Be brief.\nThink first."
    assert not ready.columns["grounding"]["no_think"]


def test_a_template_may_use_columns():
    settings = GroundingSettings(template="{ask}: {instruction} ({width})")
    assert text_of(grounding_task(screen(ask="one"), settings, Resize(28))) == "one: save it (308)"
    with pytest.raises(UserError, match=r"'ask'.*bbox|'ask'.*columns"):
        grounding_task(screen(), settings, Resize(28))


@pytest.mark.parametrize(("template", "message"), [("{width}", "instruction"), ("{instruction", "braces")])
def test_a_template_without_the_instruction_is_refused(template, message):
    with pytest.raises(UserError, match=message):
        GroundingSettings(template=template).validate()


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        (screen(bbox=None), "bad_target"),
        (screen(refusal=True), "bad_target"),
        (screen(bbox=[1, 2, 3]), "bad_target"),
        (screen(bbox=["a", 2, 3, 4]), "bad_target"),
        (screen((600, 2)), "unusable_image"),
        (replace(screen(), images=[]), "bad_screen"),
        (replace(screen(), images=["/nowhere/a.png"]), "unreadable_image"),
    ],
)
def test_a_screen_that_cannot_be_used_is_an_error_of_its_task(task, kind):
    with pytest.raises(TaskError) as error:
        grounding_task(task, GroundingSettings(), Resize(28))
    assert error.value.kind == kind


def test_training_drops_and_counts_bad_boxes_and_held_out_ones_stay():
    tasks = [screen(), screen(bbox=[10, 10, 10, 50]), screen(bbox=[290, 10, 400, 50]), screen(bbox=[90, 60, 30, 20])]
    settings = GroundingSettings()
    kept = prepare_tasks(LoadedTasks(list(tasks)), settings, Resize(28), training=True)
    assert (len(kept.tasks), kept.skipped) == (2, {"unusable_box": 2})
    assert kept.tasks[1].columns["grounding"]["bbox"] == [30, 20, 90, 60]
    held_out = prepare_tasks(LoadedTasks(list(tasks)), settings, Resize(28), training=False).tasks
    assert [task.columns["grounding"]["bbox"] for task in held_out] == [task.columns["bbox"] for task in tasks]
    with pytest.raises(UserError, match="all 1 training boxes"):
        prepare_tasks(LoadedTasks(tasks[1:2]), settings, Resize(28), training=True)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_the_model_sees_the_size_that_the_prompt_names(family, tmp_path):
    """The processor does not resize again, or the question is refused."""
    settings = GroundingSettings(family=family)
    config = ModelConfig(path=str(small_model(tmp_path / "model", family)), min_pixels=10_000, max_pixels=60_000)
    policy = load_policy(config)
    for size in ((300, 200), (200, 300), (90, 31), (1000, 700)):
        task = grounding_task(screen(size, bbox=[1, 1, 20, 20]), settings, settings.resize(config))
        grid = policy.encode(task).media["image_grid_thw"]
        patch = policy.layout.patch_size
        assert (grid[0, [2, 1]] * patch).tolist() == list(task.image_wh[0])
    other = grounding_task(screen((1000, 700)), settings, replace(settings.resize(config), max_pixels=200_000))
    with pytest.raises(UserError, match="the processor resizes again"):
        policy.encode(other)


def test_pixels_are_those_of_the_resized_image(tmp_path):
    """The model gets the suite's resized image, not the processor's."""
    policy = load_policy(ModelConfig(path=str(small_model(tmp_path / "model"))))
    image = Image.radial_gradient("L").convert("RGB").resize((230, 170))
    task = replace(screen((230, 170)), images=[image])
    ours = policy.encode(grounding_task(task, GroundingSettings(), Resize(28)))
    resized = image.resize((224, 168))
    direct = policy.encode(replace(task, images=[resized]))
    assert torch.equal(ours.media["pixel_values"], direct.media["pixel_values"])


def test_the_space_is_that_of_the_family_unless_it_is_named():
    assert GroundingSettings(family="qwen3_vl").point_space is CoordinateSpace.REL1000
    assert GroundingSettings(family="qwen3_vl", space="rel1").point_space is CoordinateSpace.REL1
    assert GroundingSettings(family="qwen3_vl").resize(ModelConfig(path="")).factor == 32
    assert GroundingSettings(factor=16).resize(ModelConfig(path="")).factor == 16


SIZES = [(1920, 1080), (1280, 800), (390, 844)]


def own_rows(folder, change, count=30):
    """Rows of an own file whose boxes, corners in pixels all over their screens, are changed."""
    rows = []
    for number in range(count):
        width, height = SIZES[number % 3]
        x, y = (0.05 + 0.028 * number) * width, (0.9 - 0.028 * number) * height
        box = change([x, y, x + 0.05 * width, y + 0.04 * height], width, height)
        rows.append({"id": f"r{number}", "image": f"{width}.png", "instruction": "save it", "bbox": box})
    for width, height in SIZES:
        Image.new("L", (width, height)).save(folder / f"{width}.png")
    path = folder / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def scaled(by):
    return lambda box, width, height: [value / side * by for value, side in zip(box, (width, height) * 2, strict=True)]


CONVENTIONS = {
    "fractions of the image's sides": scaled(1),
    "thousandths of the image's sides": scaled(1000),
    "100.0% fit xywh": lambda box, *size: [*box[:2], box[2] - box[0], box[3] - box[1]],
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CONVENTIONS)
def test_own_boxes_in_another_convention_are_refused(tmp_path, name, training):
    settings, resize = GroundingSettings(), Resize(28)
    right = load_tasks(DataConfig(path=str(own_rows(tmp_path, lambda box, *size: box))))
    assert len(prepare_tasks(right, settings, resize, training=training).tasks) == 30
    wrong = load_tasks(DataConfig(path=str(own_rows(tmp_path, CONVENTIONS[name]))))
    with pytest.raises(UserError, match=f"{name}.*in pixels of the image"):
        prepare_tasks(wrong, settings, resize, training=training)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_the_command_finds_the_convention_of_own_data(tmp_path, capsys, name):
    assert main(["gui", "validate", str(own_rows(tmp_path, lambda box, *size: box))]) == 0
    out = capsys.readouterr().out
    assert "custom grounding data: 30 rows" in out
    assert "usable as it is" in out
    assert main(["gui", "validate", str(own_rows(tmp_path, CONVENTIONS[name]))]) == 2
    assert name in capsys.readouterr().out


def test_thousandths_on_screens_above_1000_pixels_only(tmp_path):
    """Every box lies in its screen either way; that none of many goes beyond 1000 pixels is no chance."""
    path = own_rows(tmp_path, scaled(1000))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"image": "1920.png"}) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"100\.0% of \d+ fit in 0 to 1000: the numbers are thousandths"):
        prepare_tasks(load_tasks(DataConfig(path=str(path))), GroundingSettings(), Resize(28), training=True)


def test_swapped_sides_are_named(tmp_path, capsys):
    path = own_rows(tmp_path, lambda box, *size: box, count=1)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"original_wh": [1080, 1920]}) + "\n")
    with pytest.raises(
        UserError, match=r"is 1080 x 1920, but the image has 1920 x 1080 pixels \(the sides are swapped"
    ):
        prepare_tasks(load_tasks(DataConfig(path=str(path))), GroundingSettings(), Resize(28), training=True)
    assert main(["gui", "validate", str(path)]) == 2
    assert "the sides are swapped" in capsys.readouterr().out
    rows = [json.loads(path.read_text()) | {"image": (tmp_path / "1920.png").read_bytes()}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "stored.parquet")
    stored = load_tasks(DataConfig(path=str(tmp_path / "stored.parquet")))
    with pytest.raises(UserError, match="the sides are swapped"):
        prepare_tasks(stored, GroundingSettings(), Resize(28), training=True)


def test_the_file_of_training_is_not_held_out_unless_that_is_meant(tmp_path):
    path = str(own_rows(tmp_path, lambda box, *size: box))
    data, eval_data = DataConfig(path=path), {"heldout": DataConfig(path=f"{tmp_path}/../{tmp_path.name}/own.jsonl")}
    with pytest.raises(
        UserError, match=r"eval_data\.heldout\.path .* also the training file.*grounding\.seen: \[heldout\]"
    ):
        check_held_out(data, eval_data, [])
    check_held_out(data, eval_data, ["heldout"])
    with pytest.raises(UserError, match="contains 'hold'"):
        check_held_out(data, eval_data, ["hold"])
    check_held_out(DataConfig(path="hub/screens"), {"test": DataConfig(path="hub/screens", split="test")}, [])
