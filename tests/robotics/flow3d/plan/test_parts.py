"""A model chooses the part of an object to grasp."""

import json

import numpy as np
import pytest

from robotics.flow3d.clouds import world_points
from robotics.flow3d.plan.vlm import AskedPart, ChatEndpoint, NoAnswer, draw_marks, read_part
from tests.robotics.flow3d.drawn import CENTRE, RADIUS_M, drawn_sphere


def test_the_chosen_mark_is_a_point_on_the_object(chat_server):
    observation = drawn_sphere()
    find = AskedPart(ChatEndpoint(chat_server.url, "chooser", timeout_s=60.0), marks=6)
    chat_server.answers += [json.dumps({"mark": mark, "why": "it is near"}) for mark in range(1, 7)]
    places = np.stack([find(observation, observation.mask) for _ in range(6)])
    np.testing.assert_allclose(np.linalg.norm(places - CENTRE, axis=-1), RADIUS_M, atol=1e-6)
    apart = np.linalg.norm(places[:, None] - places[None], axis=-1)[np.triu_indices(6, 1)]
    assert apart.min() > 0.015
    body = chat_server.requests[0].body
    assert "Task: move the ball" in json.dumps(body)
    assert [part["type"] for part in body["messages"][1]["content"]] == ["image_url", "text"]
    visible, _ = world_points(observation)
    nearest = np.linalg.norm(visible[observation.mask][:, None] - places[None], axis=-1).min(0)
    np.testing.assert_allclose(nearest, 0, atol=1e-9)


def test_no_answer_and_nonsense_have_names(chat_server):
    observation = drawn_sphere()
    find = AskedPart(ChatEndpoint(chat_server.url, "chooser", timeout_s=60.0))
    chat_server.answers += [{"content": None, "refusal": "no"}, 503, "the handle"]
    for reason in ("refused", "down", "unusable response"):
        with pytest.raises(NoAnswer, match=reason):
            find(observation, observation.mask)


@pytest.mark.parametrize("answer", ["", "3", '{"mark": 0}', '{"mark": 9}', '{"mark": true}', '{"mark": "2"}'])
def test_only_a_number_among_the_marks_is_read(answer):
    with pytest.raises(NoAnswer, match="unusable response"):
        read_part(answer, 8)
    assert read_part('```json\n{"mark": 8}\n```', 8) == 8


def test_marks_are_drawn_where_they_are():
    rgb = np.zeros((128, 128, 3), np.uint8)
    drawn = draw_marks(rgb, np.array([[10, 20], [100, 90]]))
    assert drawn.shape == (512, 512, 3)
    for row, column in ((10, 20), (100, 90)):
        assert drawn[int(4 * (row + 0.5)), int(4 * (column + 0.5))].tolist() == [255, 255, 0]
    assert not drawn[250:260].any()
