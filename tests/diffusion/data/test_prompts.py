"""Prompt files of all kinds, and their faults."""

import json

import pytest

from diffusion.data.prompts import PromptConfig, load_prompts
from diffusion.diffusion_recipe import columns_of
from mmrl.errors import UserError
from mmrl.fields import check_config


def long_word(prompt):
    return "the end" if len(prompt) > 20 else None


def test_text_files_have_a_prompt_a_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffa café\r\n\n  a dog  \n".encode() + b"x" * 30 + b"\n")
    found = load_prompts(PromptConfig(path=str(path)), long_word)
    assert [(task.id, task.prompt, task.columns) for task in found.tasks] == [
        ("prompts.txt line 1", "a café", {}),
        ("prompts.txt line 3", "a dog", {}),
    ]
    assert found.skipped == {"empty": 1, "too_long": 1}


def test_a_line_ends_at_its_line_feed_alone(tmp_path):
    """str.splitlines() would make five prompts of these two."""
    path = tmp_path / "prompts.txt"
    path.write_bytes("a sign:\u2028stop\x0cgo\r\na dog\x85sleeps\n".encode())
    prompts = [task.prompt for task in load_prompts(PromptConfig(path=str(path))).tasks]
    assert prompts == ["a sign:\u2028stop\x0cgo", "a dog\x85sleeps"]


def test_json_lines_keep_their_columns(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"caption": "one", "metadata": {"tag": "x"}}, {"caption": 5}, {"label": 1}, {"caption": "two", "label": 2}]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n{broken\n")
    found = load_prompts(PromptConfig(path=str(path), prompt_key="caption"))
    assert [task.prompt for task in found.tasks] == ["one", "two"]
    assert sum(found.skipped.values()) == 3
    assert found.skipped["empty"] == 1
    columns = columns_of(found.tasks)
    assert columns["metadata"] == [{"tag": "x"}, None]
    assert columns["label"] == [None, 2]


def test_limit_counts_good_prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\none\ntwo\nthree\n")
    found = load_prompts(PromptConfig(path=str(path), max_tasks=2))
    assert [task.prompt for task in found.tasks] == ["one", "two"]
    assert found.skipped == {"empty": 1}


UNUSABLE = r"prompts\.txt(: no usable rows| is empty| cannot be read)"


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("prompts.txt", b"", {}, UNUSABLE),
        ("prompts.txt", b"\n \n", {}, UNUSABLE),
        ("prompts.txt", b"\xff\xfe\xfa", {}, UNUSABLE),
        (
            "prompts.txt",
            b"good\n\nalso good\n",
            {"on_bad_row": "error"},
            r"prompts\.txt line 2: the prompt is empty.*on_bad_row=skip",
        ),
        (  # no other column is taken
            "prompts.jsonl",
            b'{"prompt": "one"}\n',
            {"on_bad_row": "error", "prompt_key": "caption"},
            "column 'caption' not found; the row has: prompt",
        ),
        ("absent.txt", None, {}, r"file not found: .*absent\.txt"),
        ("", None, {"path": ""}, r"data\.path is not set"),
    ],
)
def test_files_that_cannot_be_used_are_errors(name, content, options, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_prompts(PromptConfig(**{"path": str(tmp_path / name)} | options))


def test_build_functions_write_what_is_missing(tmp_path):
    path = tmp_path / "deep" / "digits.jsonl"
    config = PromptConfig(path=str(path), build="diffusion.toy.digits:build_prompts")
    assert len(load_prompts(config).tasks) == 10
    path.write_text('{"prompt": "mine"}\n')
    assert [task.prompt for task in load_prompts(config).tasks] == ["mine"]  # an existing file is left alone


@pytest.mark.parametrize(("key", "value"), [("on_bad_row", "ignore"), ("max_tasks", 0)])
def test_options_out_of_range_are_refused(key, value):
    with pytest.raises(ValueError, match=rf"data\.{key} is"):
        check_config(PromptConfig(path="x.txt", **{key: value}), "data")


def test_columns_of_no_rows_are_none():
    assert columns_of([]) == {}


def test_long_prompts_and_half_characters_are_left_out_before_they_are_tokenised(tmp_path):
    def count(prompt):
        assert len(prompt) <= 10_000
        return None

    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "x" * 600_000}, {"prompt": "half \ud800"}, {"prompt": "good"}, {"prompt": ["x" * 100_000]}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    found = load_prompts(PromptConfig(path=str(path)), count)
    assert [task.prompt for task in found.tasks] == ["good"]
    assert found.skipped == {"too_long": 1, "unreadable": 1, "empty": 1}
    with pytest.raises(UserError, match="line 1: the prompt has 600000 characters") as refused:
        load_prompts(PromptConfig(path=str(path), on_bad_row="error"), count)
    assert len(str(refused.value)) < 300
