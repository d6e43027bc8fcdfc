"""Rows as other tools and published sets write them: each is read, or refused by name before the run."""

import contextlib
import datetime
import decimal
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from mmrl.errors import UserError
from mmrl.rewards import RewardConfig, RewardSum, TrainerState
from mmrl.vlm.data.dataset import DataConfig, load_tasks
from mmrl.vlm.data.task import TaskError, check_columns, columns_of, open_image, score_texts

USER = {"role": "user", "content": "What is 2 + 3?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
THOUGHT = {"role": "assistant", "content": "5", "reasoning_content": "2 and 3"}
ANSWER = {"role": "assistant", "content": "\\boxed{5}"}


def load(folder: Path, *rows: dict, **options):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_tasks(DataConfig(path=str(folder / "rows.jsonl"), **options)).tasks


def load_table(folder: Path, **columns):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return load_tasks(DataConfig(path=str(folder / "rows.parquet"))).tasks


def png(colour="red", size=(40, 30)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def score(tasks, *rewards, functions=None, text="\\boxed{5}"):
    """As a run does: the check before it, then a step."""
    with contextlib.closing(RewardSum([RewardConfig(name=name) for name in rewards], functions=functions)) as terms:
        check_columns(terms, {"data": tasks})
        count = len(tasks)
        return score_texts(terms, TrainerState(7, 9), tasks, [text] * count, [[1, 2]] * count)


def test_images_in_columns_that_nothing_reads_are_refused(tmp_path):
    """MMMU's image_1, and the decoded_image of several others: the questions would be asked without them."""
    mmmu = {"question": ["<image 1> What is x?"] * 2, "answer": ["B"] * 2, "options": ["['1', '2']"] * 2}
    with pytest.raises(UserError, match=r"has images in image_1, which nothing reads; set data.image_key"):
        load_table(tmp_path, **mmmu, image_1=[png()] * 2, image_2=[None] * 2)
    file = {"question": "What is x?", "img": "a.png", "answer": "b.png"}
    with pytest.raises(UserError, match="has images in img, which nothing reads"):
        load(tmp_path, file)
    assert not load(tmp_path, file, text_only=True)[0].images
    assert not load(tmp_path, {"question": "Open a.png", "answer": "b.png", "note": "see a.png."})[0].images


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_of_a_row_reach_its_question(tmp_path, as_text):
    weather = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    cell = [weather | {"strict": None}]
    rows = [
        {"prompt": "q", "answer": "1", "tools": json.dumps(cell) if as_text else cell},
        {"prompt": "q", "answer": "1", "tools": ["hammer"]},
        {"prompt": "q", "answer": "1", "tools": None},
    ]
    tasks = load(tmp_path, *rows)
    assert [task.tools for task in tasks] == [[weather], [], []]
    assert tasks[1].columns["tools"] == ["hammer"]


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("completions", ["\\boxed{5}"]),
        ("prompts", ["q"]),
        ("trainer_state", None),
        ("completion_ids", [[1, 2]]),
        ("completion_lengths", [2]),
    ],
)
def test_a_column_with_the_name_of_an_argument_is_passed_under_another(tmp_path, caplog, name, own):
    """TRL's stepwise sets have `completions`, tokenised ones ids and lengths."""
    got = {}

    def mine(**columns):
        got.update(columns)
        return [1.0]

    (task,) = load(tmp_path, {"prompt": "q", "answer": "5", name: ["the data's"]})
    result = score([task], "exact", "mine", functions={"mine": mine})
    assert (result.total, result.errors) == ([2.0], {})
    assert got[f"data_{name}"] == [["the data's"]]
    if own is None:
        assert isinstance(got[name], TrainerState)
    else:
        assert got[name] == own
    assert f"data: rewards get the column '{name}' as 'data_{name}'" in caplog.text


def test_both_names_cannot_be_columns(tmp_path):
    tasks = load(tmp_path, {"prompt": "q", "answer": "5", "completions": "a", "data_completions": "b"})
    with pytest.raises(UserError, match=r"the columns 'completions' and 'data_completions'.*rename one"):
        score(tasks, "exact")


def test_columns_of_an_ordinary_set_keep_their_names(tmp_path, caplog):
    (task,) = load(tmp_path, {"prompt": "q", "answer": "5", "completion": "x", "labels": [1], "state": 1, "self": 2})
    assert {*columns_of([task], [[1]])} == {
        *("answer", "completion", "labels", "state", "self"),
        *("completion_ids", "completion_lengths"),
    }
    assert score([task], "exact").total == [1.0]
    assert "rewards get the column" not in caplog.text


@pytest.mark.parametrize("answer", [5, 5.0, "5", " 5 ", ["5", "five"], [5], "#### 5", "\\boxed{5}"])
def test_right_answers_in_any_form(tmp_path, answer):
    assert score(load(tmp_path, {"prompt": "q", "answer": answer}), "exact").total == [1.0]
    if not isinstance(answer, list):
        assert score(load(tmp_path, {"prompt": "q", "answer": answer}), "number").total == [1.0]


def test_numbers_of_tables_that_store_floats(tmp_path):
    """A column of whole numbers with a gap becomes one of floats on its way through pandas."""
    tasks = load_table(tmp_path, prompt=["q", "r"], answer=[5.0, 5.5])
    assert score(tasks, "exact").total == [1.0, 0.0]
    assert score(tasks, "exact", text="\\boxed{5.0}").total == [1.0, 0.0]
    assert score(tasks, "exact", text="\\boxed{5.5}").total == [0.0, 1.0]
    tasks = load_table(tmp_path, prompt=["q"], answer=[decimal.Decimal("5.0")])
    assert score(tasks, "exact").total == [1.0]


@pytest.mark.parametrize("answer", [True, {"value": 5}, [], [None], ["a", ["b"]]])
def test_an_answer_that_no_reward_can_judge_stops_before_the_run(tmp_path, answer):
    tasks = load(tmp_path, {"prompt": "q", "answer": answer})
    with pytest.raises(UserError, match=r"data: reward 'exact' cannot score 1 of 1 rows, e.g. rows\.jsonl line 1"):
        score(tasks, "exact")
    assert score(tasks, "mine", functions={"mine": lambda completions, **columns: [1.0]}).total == [1.0]


def test_letters_that_are_numbers_stop_before_the_run_and_single_bad_rows_are_named(tmp_path, caplog):
    with pytest.raises(UserError, match=r"'choice' cannot score 2 of 2 rows.*does not start with one of the letters"):
        score(load(tmp_path, {"prompt": "q", "answer": 1}, {"prompt": "r", "answer": 2}), "choice")
    score(load(tmp_path, {"prompt": "q", "answer": "A"}, {"prompt": "r", "answer": 2}), "choice")
    assert "reward 'choice' cannot score 1 of 2 rows, e.g. rows.jsonl line 2" in caplog.text


def test_bytes_are_no_answer(tmp_path):
    with pytest.raises(UserError, match="the answer in column 'answer' is bytes or an image"):
        load_table(tmp_path, prompt=["q"], answer=[b"5"])


def test_rows_of_verl(tmp_path):
    row = {"data_source": "x", "prompt": [USER], "ability": "math", "extra_info": {"index": 1}}
    (task,) = load(tmp_path, row | {"reward_model": {"style": "rule", "ground_truth": "5"}})
    assert task.columns["answer"] == "5"
    assert score([task], "exact").total == [1.0]
    (named,) = load(tmp_path, row | {"reward_model": "org/judge"})  # another meaning of the name
    assert "answer" not in named.columns


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER], "answer": "5"},
        {"conversations": [USER, ANSWER], "answer": "5"},
        {"conversations": [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": "\\boxed{5}"}]},
        {"messages": [{**USER, "content": [{"type": "text", "text": USER["content"]}]}, ANSWER]},
    ],
    ids=["trl", "conversations", "sharegpt", "items"],
)
def test_the_answer_in_a_conversation_is_not_part_of_the_question(tmp_path, row):
    (task,) = load(tmp_path, row)
    assert task.messages == [{"role": "user", "content": [{"type": "text", "text": USER["content"]}]}]
    assert task.columns["completion"] == "\\boxed{5}"
    assert task.answer_start == ""


def test_conversations_with_several_turns_images_and_no_answer(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "<image>\nWhat?"},
        {"from": "gpt", "value": "A cat."},
        {"from": "human", "value": "Sure?"},
    ]
    (task,) = load(tmp_path, {"conversations": turns, "image": "a.png"})
    assert [turn["role"] for turn in task.messages] == ["system", "user", "assistant", "user"]
    assert [item["type"] for item in task.messages[1]["content"]] == ["image", "text"]
    assert "completion" not in task.columns
    (own,) = load(tmp_path, {"messages": [USER, ANSWER], "completion": "own"})
    assert own.columns["completion"] == "own"


def test_a_prompt_that_ends_with_the_assistant_is_a_started_answer_as_in_trl(tmp_path):
    (task,) = load(tmp_path, {"prompt": [USER, {"role": "assistant", "content": "It is"}], "answer": "5"})
    assert [turn["role"] for turn in task.messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2], "labels": [1, 2]}, "no question column.*columns are input_ids, labels.*token"),
        ({"prompt": [1, 2, 3]}, "a chat turn needs a role and a content, found 1"),
        ({"prompt": 5}, "the question is a int"),
        ({"prompt": ["a", "b"]}, "a chat turn needs a role and a content, found 'a'"),
        ({"prompt": json.dumps([USER])}, "a string with chat turns in JSON"),
        ({"prompt": json.dumps([{"from": "human", "value": "q"}])}, "a string with chat turns in JSON"),
        ({"prompt": [{"role": "User", "content": "q"}]}, "the role 'User'; expected: user, assistant, system"),
        ({"prompt": [{"role": "bot", "content": "q"}]}, "the role 'bot'"),
        ({"prompt": [{"role": "user", "content": None}]}, "needs a role and a content"),
        ({"prompt": [USER, CALL, USER]}, "a chat turn has tool_calls, which is not read and would be lost"),
        ({"messages": [USER, CALL | {"content": ""}]}, "a chat turn has tool_calls"),
        ({"prompt": [USER, THOUGHT, USER]}, "a chat turn has reasoning_content"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "image"}]}]}, "contains more than text"),
        ({"prompt": "q", "image": [3, 4]}, "an image is 3; expected a PIL image, a path, bytes"),
        ({"prompt": "q", "image": [[0, 0], [0, 0]]}, r"an image is \[0, 0\]"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, row)


def test_a_question_about_json_is_a_question(tmp_path):
    texts = ["[{", '[{"a": 1}]', '[{"role": "user", "content": "x"}] What does this JSON hold?', "[]"]
    tasks = load(tmp_path, *({"prompt": text} for text in texts))
    assert [task.messages[0]["content"][0]["text"] for task in tasks] == texts


def takes_all(prompts, completions, **columns):
    return [float("mask" not in columns and "answer" in columns)] * len(completions)


def names_it(prompts, completions, mask, **columns):
    size = Image.open(io.BytesIO(mask[0]["bytes"])).size
    return [float(size == (6, 4))] * len(completions)


@pytest.mark.parametrize("function", ["takes_all", "names_it"])
def test_further_images_go_to_the_functions_that_name_them(tmp_path, function):
    """In worker processes, which are sent no table; a function of **columns does without what is large."""
    cell = {"bytes": png(), "path": None}
    tasks = load_table(
        tmp_path, prompt=["q"], image=[cell], mask=[{"bytes": png(size=(6, 4)), "path": None}], answer=["5"]
    )
    result = score(tasks, f"{__file__}:{function}")
    assert (result.total, result.errors) == ([1.0], {})


def test_a_table_with_times_decimals_and_tokens(tmp_path):
    tasks = load_table(
        tmp_path,
        prompt=["q"],
        answer=["5"],
        day=[datetime.date(2026, 1, 1)],
        price=[decimal.Decimal("1.50")],
        input_ids=[[1, 2]],
    )
    result = score(tasks, f"{__file__}:takes_all")
    assert (result.total, result.errors) == ([1.0], {})


def test_paths_in_a_table_start_from_its_folder(tmp_path, monkeypatch):
    (tmp_path / "pics").mkdir()
    (tmp_path / "pics/a.png").write_bytes(png(size=(8, 6)))
    monkeypatch.chdir("/")
    cell = {"bytes": None, "path": "pics/a.png"}
    (one,) = load_table(tmp_path, prompt=["q"], image=[cell], answer=["5"])
    assert one.load_images()[0].size == (8, 6)
    (listed,) = load_table(tmp_path, prompt=["q"], images=[[cell]], answer=["5"])
    assert listed.load_images()[0].size == (8, 6)


def test_an_image_object_is_turned_like_its_file(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20), "red").save(tmp_path / "phone.jpg", exif=exif)
    with Image.open(tmp_path / "phone.jpg") as phone:
        assert phone.size == (40, 20)
        sizes = {open_image(source, "t").size for source in (phone, str(tmp_path / "phone.jpg"))}
    assert sizes == {(20, 40)}


def test_a_broken_prefix_of_an_image_is_named():
    with pytest.raises(TaskError, match="it is damaged or not an image; allowed formats are PNG, JPEG, WEBP, GIF, BMP"):
        open_image(b"\0\0\0\x18ftypheic", "t")
