import math

import pytest
import torch

from mmrl.vlm.data.prompt import Prompt, VlmPayload
from tests.vlm.builders import make_task


def make_prompt(value: int, pixels: bool = True) -> Prompt:
    ids = torch.full((3,), value)
    return Prompt(
        input_ids=ids,
        mm_token_type_ids=torch.zeros_like(ids),
        position_ids=torch.zeros(3, 3, dtype=torch.int64),
        next_position=3,
        media={"pixel_values": torch.full((4, 2), float(value)), "image_grid_thw": torch.tensor([[1, 2, 2]])}
        if pixels
        else {},
        text=str(value),
    )


def make_payload(first: int, groups: int, rows: int, width: int) -> VlmPayload:
    numbers = range(first, first + rows)
    return VlmPayload(
        prompts=[make_prompt(first + group) for group in range(groups)],
        tasks=[make_task(f"t{first + group}", "?") for group in range(groups)],
        response_ids=torch.arange(first, first + rows)[:, None].expand(rows, width).contiguous(),
        texts=[f"text {number}" for number in numbers],
        finish=["eos"] * rows,
        views={"masked": [make_prompt(-first - group) if group else None for group in range(groups)]},
    )


def test_select_keeps_order_and_shares_the_prompts():
    payload = make_payload(10, groups=3, rows=6, width=2)
    part = payload.select(torch.tensor([4, 1]), torch.tensor([2, 0]))
    assert part.prompts[0] is payload.prompts[2]
    assert part.prompts[1] is payload.prompts[0]
    assert [task.id for task in part.tasks] == ["t12", "t10"]
    assert part.response_ids.tolist() == [[14, 14], [11, 11]]
    assert part.texts == ["text 14", "text 11"]
    assert part.views["masked"] == [payload.views["masked"][2], None]


def test_concat_pads_responses_and_fills_missing_views():
    left, right = make_payload(10, groups=2, rows=2, width=3), make_payload(20, groups=1, rows=2, width=1)
    right.views = {"other": [make_prompt(7)]}
    both = VlmPayload.concat([left, right])
    assert both.response_ids.tolist() == [[10] * 3, [11] * 3, [20, 0, 0], [21, 0, 0]]
    assert [prompt.text for prompt in both.prompts] == ["10", "11", "20"]
    assert both.texts == [*left.texts, *right.texts]
    assert [prompt is None for prompt in both.views["masked"]] == [True, False, True]
    assert [prompt is None for prompt in both.views["other"]] == [True, True, False]


def test_concat_of_parts_is_the_whole():
    payload = make_payload(0, groups=2, rows=4, width=2)
    rows, groups = torch.arange(4), torch.arange(2)
    parts = [payload.select(rows[:2], groups[:1]), payload.select(rows[2:], groups[1:])]
    whole = VlmPayload.concat(parts)
    assert torch.equal(whole.response_ids, payload.response_ids)
    assert whole.prompts == payload.prompts
    assert whole.views == payload.views


def test_views_fall_back_to_the_original_prompt():
    payload = make_payload(10, groups=2, rows=2, width=1)
    assert payload.prompts_of("original") is payload.prompts
    assert payload.prompts_of("masked") == [payload.prompts[0], payload.views["masked"][1]]
    with pytest.raises(ValueError, match="original, masked"):
        payload.prompts_of("blurred")


def test_to_moves_pixels_and_keeps_prompts_that_are_there_already():
    payload = make_payload(10, groups=2, rows=2, width=1)
    assert all(new is old for new, old in zip(payload.to("cpu").prompts, payload.prompts, strict=True))
    moved = payload.to("meta")
    assert moved.response_ids.device.type == "meta"
    assert moved.prompts[0].media["pixel_values"].device.type == "meta"
    assert moved.views["masked"][1].media["pixel_values"].device.type == "meta"
    assert moved.prompts[0].input_ids.device.type == "cpu"
    assert make_prompt(1, pixels=False).to("meta").media == {}


@pytest.mark.parametrize("change", [{"tasks": []}, {"texts": ["only one"]}, {"finish": []}, {"views": {"masked": []}}])
def test_lists_that_do_not_fit(change):
    fields = vars(make_payload(10, groups=2, rows=2, width=1)) | change
    with pytest.raises(ValueError, match="2 rows in 2 groups"):
        VlmPayload(**fields)


def test_the_share_of_finished_responses_is_that_of_those_there_are():
    payload = make_payload(10, groups=1, rows=4, width=2)
    payload.finish = ["eos", "length", "stop", ""]  # the last one is of an episode that did not start
    assert payload.finished_fraction.value == 2 / 3
    payload.finish = [""] * 4
    assert math.isnan(payload.finished_fraction.value), "not 0: nothing was cut"
