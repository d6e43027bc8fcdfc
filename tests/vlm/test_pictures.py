"""Pictures with questions: labels and answers, disjoint splits, hints, other pictures and the reward."""

import random

import numpy as np
import pytest
from PIL import Image

from mmrl.runs.records import read_jsonl
from mmrl.vlm.data.dataset import DataConfig, load_tasks
from mmrl.vlm.toy import pictures
from mmrl.vlm.toy.pictures import (
    ANSWERS,
    COLOURS,
    GROUPS,
    NOTHING,
    QUESTIONS,
    build_questions,
    draw_scene,
    names_answer,
)


def shown(scene, group):
    """Words of a group that cells of a picture show."""
    return {GROUPS[group][place] for place in scene.cells[group] if place != NOTHING}


@pytest.mark.parametrize("kind", list(QUESTIONS))
def test_cells_show_the_answer_and_answers_are_even(kind):
    rng = random.Random(0)
    scenes = [draw_scene(rng, "train", kind) for _ in range(300)]
    group = {"shape": "thing", "fruit": "thing", "position": "side"}.get(kind, kind)
    assert all(scene.answer in shown(scene, group) for scene in scenes)
    counts = [sum(scene.answer == answer for scene in scenes) for answer in ANSWERS[kind]]
    assert sum(counts) == 300
    assert max(counts) < 2 * 300 / len(counts)


def test_colours_of_cells_are_those_of_pixels():
    rng = random.Random(1)
    for _ in range(50):
        scene = draw_scene(rng, "train", "shape")
        pixels = np.asarray(scene.image, float).reshape(4, 16, 4, 16, 3).transpose(0, 2, 1, 3, 4).reshape(16, -1, 3)
        for place, colour in enumerate(scene.cells["colour"]):
            if colour != NOTHING:
                wanted = np.array(COLOURS[GROUPS["colour"][colour]])
                assert np.abs(pixels[place] - wanted).max(-1).min() < 40


def test_the_held_out_split_asks_about_combinations_that_training_never_shows(monkeypatch):
    drawn = []
    monkeypatch.setattr(pictures, "_is_held_out", lambda *words, own=pictures._is_held_out: note(own(*words), words))

    def note(held, words):
        drawn.append((frozenset(words), held))
        return held

    rng = random.Random(2)
    for split in ("train", "heldout"):
        for kind in QUESTIONS:
            for _ in range(60):
                draw_scene(rng, split, kind)
    assert len({words for words, held in drawn if held} & {words for words, held in drawn if not held}) == 0
    for colour in COLOURS:  # some combinations are held out, and no whole thing in a colour
        for thing in GROUPS["thing"]:
            own = {words for words, _ in drawn if {colour, thing} <= words}
            assert not own or any(not held for words, held in drawn if words in own)


def test_rows_are_real_tasks_and_repeat_with_other_hints_and_pictures(tmp_path):
    plain = build_questions(tmp_path / "plain.jsonl", count=40, seed=5)
    again = build_questions(tmp_path / "again" / "plain.jsonl", count=40, seed=5)
    assert plain.read_text() == again.read_text()
    rows = read_jsonl(plain)
    hinted = read_jsonl(build_questions(tmp_path / "hinted.jsonl", count=40, hint_share=1.0, hint_rate=0.5, seed=5))
    blank = read_jsonl(build_questions(tmp_path / "blank.jsonl", count=40, shown="blank", seed=5))
    other = read_jsonl(build_questions(tmp_path / "other.jsonl", count=40, shown="other", seed=5))
    assert {row["hint_place"] for row in hinted} == {"front", "friend", "behind"}
    for row, hint, black, swapped in zip(rows, hinted, blank, other, strict=True):
        question = row["problem"].removeprefix("<image>")
        assert question in hint["problem"]
        assert hint["hint_text"] in hint["problem"].replace(question, "")
        assert (hint["hint_text"] == hint["answer"]) == (hint["hint"] == "right")
        assert row["answer"] == hint["answer"] == black["answer"] == swapped["answer"]
        images = [Image.open(tmp_path / one["images"][0]) for one in (row, hint, black, swapped)]
        assert np.array_equal(*map(np.asarray, images[:2]))
        assert not np.asarray(images[2]).any()
        assert not np.array_equal(images[0], images[3])
    (image,) = load_tasks(DataConfig(path=str(plain))).tasks[0].load_images()
    assert image.size == (64, 64)


def test_questions_about_something_else_are_held_out_and_can_stand_alone(tmp_path):
    train = read_jsonl(build_questions(tmp_path / "train.jsonl", count=100, general=0.5, hint_share=1.0, seed=1))
    alone = read_jsonl(
        build_questions(tmp_path / "t.jsonl", count=40, split="fresh", general=1.0, shown="none", seed=1)
    )
    general = [row for row in train if row["kind"] == "general"]
    assert 30 < len(general) < 70
    assert {row["hint"] for row in general} == {"none"}
    assert all(row["images"] for row in train)
    assert not any(row["images"] or "<image>" in row["problem"] for row in alone)
    assert not {row["problem"].removeprefix("<image>") for row in general} & {row["problem"] for row in alone}
    assert names_answer([""] * 40, [row["completion"] for row in alone], **columns(alone)) == [1.0] * 40
    assert load_tasks(DataConfig(path=str(tmp_path / "t.jsonl"))).tasks


def columns(rows):
    return {name: [row[name] for row in rows] for name in ("answer", "kind")}


@pytest.mark.parametrize(
    ("said", "reward"),
    [("red", 1.0), ("The ring is Red.", 1.0), ("red or blue", 0.0), ("reddish", 0.0), ("", 0.0), ("blue", 0.0)],
)
def test_the_reward_reads_one_answer_out_of_a_text(said, reward):
    assert names_answer(["What colour is the ring?"], [said], answer=["red"], kind=["colour"]) == [reward]


def test_unknown_options_are_refused(tmp_path):
    with pytest.raises(ValueError, match="allowed: own, blank, other, none"):
        build_questions(tmp_path / "a.jsonl", shown="black")
    with pytest.raises(ValueError, match="allowed: train, fresh, heldout"):
        build_questions(tmp_path / "a.jsonl", count=1, split="test")
