import io
import json

import pytest
from PIL import Image

from mmrl.errors import UserError
from mmrl.rewards.answers import exact_reward, format_reward
from mmrl.runs.records import read_jsonl
from mmrl.vlm.critic.questions import CRITIC_TEMPLATE, ORDERS, build_questions
from mmrl.vlm.data.dataset import DataConfig, load_tasks
from mmrl.vlm.toy.critic_digits import build_critic_start, build_pairs, build_readings
from tests.vlm.pairs import write_pairs

SHORT = "{{ question }} {{ first }} or {{ second }}"


def text_of(task):
    return "".join(item.get("text", f"<{item['type']}>") for item in task.messages[-1]["content"])


def test_every_pair_is_asked_in_both_orders(tmp_path):
    source = write_pairs(tmp_path / "data")
    path = build_questions(tmp_path / "critic.jsonl", pairs={"path": str(source)})
    found = read_jsonl(path)
    assert len(found) == 12
    assert [row["answer"] for row in found] == ["1", "2"] * 6
    assert [row["order"] for row in found] == list(ORDERS) * 6
    assert [row["pair"] for row in found] == [f"q{n // 2}" for n in range(12)]
    good, bad = "<answer>7</answer>", "<think>3 and 2</think><answer>0</answer>"
    first, second = found[4]["prompt"], found[5]["prompt"]
    assert f"Response 1: {good}\nResponse 2: {bad}\n" in first
    assert f"Response 1: {bad}\nResponse 2: {good}\n" in second
    tasks = load_tasks(DataConfig(path=str(path))).tasks
    assert [len(task.load_images()) for task in tasks] == [1] * 10 + [0] * 2
    assert text_of(tasks[0]).count("<image>") == 1


def test_the_answers_are_verifiable_by_the_ordinary_rewards(tmp_path):
    source = write_pairs(tmp_path / "data")
    asked = read_jsonl(build_questions(tmp_path / "critic.jsonl", pairs={"path": str(source)}))
    said = [f"<think>I see.</think>\\boxed{{{number}}}" for number in (1, 1)]
    prompts, answers = [row["prompt"] for row in asked[:2]], [row["answer"] for row in asked[:2]]
    accuracy = exact_reward(prompts, said, answer=answers)
    shape = format_reward(prompts, said, style="boxed")
    total = [0.9 * right + 0.1 * good for right, good in zip(accuracy, shape, strict=True)]
    assert total == pytest.approx([1.0, 0.1])  # always saying 1 earns half


def test_random_answers_are_uninformative_and_repeatable(tmp_path):
    pairs = {"path": str(build_pairs(tmp_path / "pairs.jsonl", count=100))}
    made = [
        [
            row["answer"]
            for row in read_jsonl(build_questions(tmp_path / name, pairs=pairs, random_answers=True, seed=seed))
        ]
        for name, seed in (("a.jsonl", 3), ("b.jsonl", 3), ("c.jsonl", 4))
    ]
    assert made[0] == made[1] != made[2]
    agree = sum(said == right for said, right in zip(made[0], ["1", "2"] * 100, strict=True))
    assert 60 < agree < 140  # 100 expected, standard deviation 7
    assert set(made[0]) == {"1", "2"}


def test_chat_turns_and_images_in_memory_are_kept(tmp_path):
    buffer = io.BytesIO()
    Image.new("RGB", (56, 56), (9, 90, 160)).save(buffer, format="PNG")
    import base64

    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
    ]
    row = {"prompt": turns, "images": [uri], "chosen": "blue", "rejected": [{"role": "assistant", "content": "red"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    path = build_questions(tmp_path / "critic.jsonl", pairs={"path": str(tmp_path / "chat.jsonl")}, template=SHORT)
    first, second = load_tasks(DataConfig(path=str(path))).tasks
    assert [turn["role"] for turn in first.messages] == ["system", "user"]
    assert text_of(first) == "<image>What is it? blue or red"
    assert text_of(second) == "<image>What is it? red or blue"
    assert first.load_images()[0].getpixel((3, 3)) == (9, 90, 160)
    assert read_jsonl(path)[0]["images"] == read_jsonl(path)[1]["images"] == ["critic/00000-0.png"]


def spoil(number, **cells):
    return lambda place, row: row.update(cells) if place == number else None


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"rejected": "<answer>7</answer>"}, "'chosen' and 'rejected' are the same text"),
        ({"rejected": None}, "no response in column 'rejected'"),
        ({"rejected": "it is <image>"}, "column 'rejected' contains <image>, which is the placeholder of a file"),
    ],
)
def test_bad_pairs_are_refused_by_name_or_left_out(tmp_path, cells, message):
    source = write_pairs(tmp_path / "data", spoil(2, **cells))
    with pytest.raises(UserError, match=f"q2: .*{message}"):
        build_questions(tmp_path / "critic.jsonl", pairs={"path": str(source)})
    left = build_questions(tmp_path / "critic.jsonl", pairs={"path": str(source), "on_bad_row": "skip"})
    assert [row["pair"] for row in read_jsonl(left)] == ["q0", "q0", "q1", "q1", "q3", "q3", "q4", "q4", "q5", "q5"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": {}}, "pairs has no path"),
        ({"pairs": {"path": "x.jsonl", "chosen": "a"}}, "pairs has no option chosen; available: answer_key"),
        ({"pairs": {"path": "x.jsonl"}, "template": "{{ question }} {{ first }}"}, r"never uses \{\{ second \}\}"),
        ({"pairs": {"path": "x.jsonl"}, "template": "{{ third }}"}, "'third' is undefined; it may only use"),
        ({"pairs": {"path": "x.jsonl"}}, "file not found"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        build_questions(tmp_path / "critic.jsonl", **options)


def test_the_digits_of_this_world_are_read_and_judged(tmp_path):
    readings = read_jsonl(build_readings(tmp_path / "read.jsonl", count=5, digits=2))
    assert all(
        row["completion"] == f"<think>{' '.join(row['answer'])}</think>\\boxed{{{row['answer']}}}" for row in readings
    )
    pairs = read_jsonl(build_pairs(tmp_path / "pairs.jsonl", count=20, digits=2))
    for row in pairs:
        assert sum(a != b for a, b in zip(row["chosen"], row["rejected"], strict=True)) == 1
    start = read_jsonl(build_critic_start(tmp_path / "start.jsonl", count=60, critic_share=0.5, template=SHORT))
    judged = [row for row in start if row["kind"] == "judge"]
    assert 15 < len(judged) < 45
    assert {row["answer"] for row in judged} == {"1", "2"}
    for row in judged:
        shown = row["problem"].removeprefix("<image>Which digits are shown? ").split(" or ")
        right, wrong = shown[int(row["answer"]) - 1], shown[2 - int(row["answer"])]
        thought = [f"{right}{right}=", f"{right}{wrong}!"]
        ordered = thought if row["answer"] == "1" else thought[::-1]
        assert row["completion"] == f"<think>{' '.join(ordered)}</think>\\boxed{{{row['answer']}}}"
        assert right != wrong


def test_the_default_wording_names_the_requested_format():
    assert "\\boxed{}" in CRITIC_TEMPLATE
    assert "<think>" in CRITIC_TEMPLATE
