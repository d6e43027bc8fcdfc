import base64
import json

import pytest
from PIL import Image

from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.hub import tables
from mmrl.vlm.data.dataset import DataConfig, TaskError, VlmTask, load_tasks
from mmrl.vlm.data.task import TASK_ERRORS, VideoOptions
from tests.vlm.data.rows import BLUE, EASYR1, RED, TRL, colours, layout, load, png, write


def test_trl_text_gets_all_images_before_it(folder):
    rows = [
        {"prompt": "What?", "image": "red.png", "solution": "7", "level": 2},
        {"prompt": "And?", "image": "blue.png", "solution": "8", "level": 3},
    ]
    first, second = load(rows).tasks
    assert first.messages[0]["role"] == "user"
    assert layout(first) == ["IMAGE", "What?"]
    assert colours(first) == [RED]
    assert colours(second) == [BLUE]
    assert first.columns == {"solution": "7", "level": 2, "answer": "7"}
    (both,) = load([{"prompt": "Same?", "images": ["red.png", "blue.png"]}]).tasks
    assert layout(both) == ["IMAGE", "IMAGE", "Same?"]
    assert colours(both) == [RED, BLUE]


def test_trl_chat_turns(folder):
    marked = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look:"}, {"type": "image"}, {"type": "text", "text": "?"}],
        },
    ]
    plain = [
        {"role": "user", "content": "Hm?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "So?"},
    ]
    (task,) = load([{"prompt": marked, "images": ["red.png"], "answer": "7"}]).tasks
    assert [turn["role"] for turn in task.messages] == ["system", "user"]
    assert task.messages[0]["content"] == [{"type": "text", "text": "Be brief."}]
    assert layout(task) == ["Look:", "IMAGE", "?"]
    (task,) = load([{"prompt": plain, "image": "red.png", "answer": "7"}]).tasks
    assert task.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "Hm?"}]
    assert layout(task) == ["So?"]


def test_chat_items_may_carry_their_images(folder):
    url = "data:image/png;base64," + base64.b64encode(png("blue")).decode()
    content = [
        {"type": "image", "image": "red.png"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image", "path": f"file://{folder}/red.png"},
        {"type": "text", "text": "?"},
    ]
    (task,) = load([{"prompt": [{"role": "user", "content": content}]}]).tasks
    assert layout(task) == ["IMAGE", "IMAGE", "IMAGE", "?"]
    assert colours(task) == [RED, BLUE, RED]


def test_easyr1_placeholders_become_items_in_order(folder):
    row = {"problem": "<image>first, <image>second?<video>", "images": ["red.png", "blue.png"], "answer": "7"}
    (folder / "clip.mp4").write_bytes(b"video")
    (task,) = load([row | {"videos": ["clip.mp4"]}]).tasks
    assert layout(task) == ["IMAGE", "first, ", "IMAGE", "second?", "VIDEO"]
    assert colours(task) == [RED, BLUE]
    assert [clip.source for clip in task.videos] == ["clip.mp4"]
    assert task.columns == {"answer": "7"}


def clips(row, **options):
    (task,) = load([row], **options).tasks
    return [(clip.source, dict(clip.options)) for clip in task.videos], layout(task)


def test_r1v_problems_have_no_marks(folder):
    """Nor do TRL's exports of such data: the image comes first, as in other data without marks."""
    rows = [
        {"problem": "What?", "image": "red.png", "solution": "7"},
        {"problem": "And?", "image": None, "solution": "8"},
    ]
    first, second = load(rows).tasks
    assert (layout(first), colours(first)) == (["IMAGE", "What?"], [RED])
    assert (layout(second), second.images) == (["And?"], [])
    with pytest.raises(UserError, match="no image"):
        load(rows, text_only=False)


@pytest.mark.parametrize("key", ["image", "path", "url", "image_url"])
def test_an_image_cell_may_be_a_mapping(folder, key):
    (task,) = load([TRL | {"image": None, "images": [{key: "red.png"}]}], image_key="images").tasks
    assert colours(task) == [RED]
    (nested,) = load([EASYR1 | {"images": [{"type": "image_url", "image_url": {"url": "blue.png"}}]}]).tasks
    assert colours(nested) == [BLUE]


def test_file_addresses_may_be_escaped(folder):
    for name in ("a b.png", "50%25.png"):
        (folder / name).write_bytes(png("blue"))
    found = [f"file://{folder}/a%20b.png", f"file://{folder}/a b.png", f"file://{folder}/50%25.png", "file:red.png"]
    for address in found[:3]:
        assert colours(load([EASYR1 | {"images": [address]}]).tasks[0]) == [BLUE]
    with pytest.raises(UserError, match=r"image file .* not found"):
        load([EASYR1 | {"images": [f"file://{folder}/c%20d.png"]}])


def test_a_video_is_a_path_a_mapping_or_a_list_of_frames(folder):
    for name in ("a.mp4", "b.mp4"):
        (folder / name).write_bytes(b"video")
    one, two, frames = "a.mp4", "b.mp4", ["red.png", "blue.png"]
    trl = {"prompt": "What?", "answer": "7"}
    assert clips(trl | {"video": "a.mp4"}) == ([(one, {})], ["VIDEO", "What?"])
    assert clips(trl | {"videos": ["a.mp4", "file://b.mp4"]})[0] == [(one, {}), (two, {})]
    part = {"video_start": 1.0, "video_end": 2.5}
    for key in ("video", "path", "url"):
        assert clips(trl | {"video": {key: "a.mp4", "nframes": 8, "fps": None} | part})[0] == [
            (one, {"nframes": 8} | part)
        ]
    assert clips(trl | {"video": ["red.png", "blue.png"]})[0] == [(frames, {})]
    assert clips(trl | {"videos": [["red.png", "blue.png"], "a.mp4"]})[0] == [(frames, {}), (one, {})]
    assert clips(trl | {"video": {"frames": ["red.png", "blue.png"], "fps": 4}})[0] == [(frames, {"sample_fps": 4})]
    chat = [{"type": "text", "text": "See "}, {"type": "video", "video": "a.mp4", "fps": 1.0, "max_pixels": 5000}]
    found = clips({"prompt": [{"role": "user", "content": chat}]})
    assert found == ([(one, {"fps": 1.0, "max_pixels": 5000})], ["See ", "VIDEO"])
    easyr1 = {"problem": "Is <video> before <video>?", "answer": "yes", "videos": ["b.mp4", "a.mp4"]}
    assert clips(easyr1) == ([(two, {}), (one, {})], ["Is ", "VIDEO", " before ", "VIDEO", "?"])
    assert clips(trl | {"film": "a.mp4"}, video_key="film")[0] == [(one, {})]
    (folder / "films").mkdir()
    (folder / "a.mp4").rename(folder / "films" / "a.mp4")
    assert clips(trl | {"video": "a.mp4"}, image_dir="films")[0] == [("films/a.mp4", {})]


def test_the_options_of_a_data_set_come_after_those_of_a_row(folder):
    (folder / "a.mp4").write_bytes(b"video")
    usual = VideoOptions(fps=1.0, max_frames=12, min_pixels=784)
    sizes = {"max_frames": 12, "min_pixels": 784}
    for own, expected in (
        ({}, {"fps": 1.0} | sizes),
        ({"nframes": 4}, {"nframes": 4} | sizes),
        ({"fps": 3, "min_pixels": 1000}, {"fps": 3, "max_frames": 12, "min_pixels": 1000}),
    ):
        assert clips({"prompt": "?", "video": {"path": "a.mp4"} | own}, video=usual)[0][0][1] == expected
    assert clips({"prompt": "?", "video": ["red.png"]}, video=usual)[0][0][1] == sizes
    with pytest.raises(ValueError, match=r"it has no effect while data\.video\.nframes is 4"):
        check_config(VideoOptions(fps=1.0, nframes=4), "data.video")


@pytest.mark.parametrize(
    ("video", "kind", "message"),
    [
        ("none.mp4", "missing_video", "video file none.mp4 not found"),
        (["red.png", "none.png"], "missing_image", "image file none.png not found"),
        (7, "bad_video", "a video is a int"),
        ({"fps": 2}, "bad_video", "a mapping with fps"),
        ({"path": "a.mp4", "speed": 2}, "bad_video", "an unknown option 'speed'; available: fps, nframes"),
        ({"path": "a.mp4", "fps": 0}, "bad_video", "fps=0; it must be a positive number"),
        ({"path": "a.mp4", "nframes": "8"}, "bad_video", "nframes='8'"),
        ({"path": "a.mp4", "fps": 2, "nframes": 8}, "bad_video", "both fps and nframes"),
        ({"frames": ["red.png"], "nframes": 8}, "bad_video", "an unknown option 'nframes'; available: sample_fps"),
        ([["red.png", 3]], "bad_video", "a video is a list"),
    ],
)
def test_bad_videos_are_counted_by_kind(folder, video, kind, message):
    (folder / "a.mp4").write_bytes(b"video")
    rows = [{"prompt": "?", "video": "a.mp4"}, {"prompt": "?", "video": video}]
    loaded = load(rows, on_bad_row="skip")
    assert loaded.skipped == {kind: 1}
    assert kind in TASK_ERRORS
    assert message in loaded.examples[kind]


def test_videos_both_in_the_chat_and_in_the_column(folder):
    (folder / "a.mp4").write_bytes(b"video")
    prompt = [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}, {"type": "text", "text": "?"}]}]
    with pytest.raises(UserError, match="use one of them"):
        load([{"prompt": prompt, "videos": ["a.mp4"], "answer": "7"}])


def test_easyr1_rows_without_image_are_text_only(folder):
    rows = [EASYR1, {"problem": "1+1?", "answer": "2", "images": []}, {"problem": "1+2?", "answer": "3"}]
    tasks = load(rows).tasks
    assert [len(task.images) for task in tasks] == [1, 0, 0]
    assert layout(tasks[2]) == ["1+2?"]


def test_system_and_format_prompt(folder):
    (folder / "wrap.jinja").write_text("{{ content | trim }} Think first.\n")
    for template in ("{{ content }} Think first.", "wrap.jinja"):
        (task,) = load([EASYR1], system_prompt="Be brief.", format_prompt=template).tasks
        assert task.messages[0] == {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
        assert layout(task) == ["IMAGE", "What? Think first."]
    chat = [{"role": "system", "content": "Own."}, {"role": "user", "content": "A"}, {"role": "user", "content": "B"}]
    (task,) = load([{"prompt": chat}], system_prompt="Be brief.", format_prompt="<{{ content }}>").tasks
    assert [turn["content"][0]["text"] for turn in task.messages] == ["Own.", "A", "<B>"]


def test_keys_can_be_named(folder):
    row = {"q": "What?", "pic": "red.png", "truth": {"value": 7}, "prompt": "no", "answer": "no"}
    (task,) = load([row], prompt_key="q", image_key="pic", answer_key="truth.value").tasks
    assert layout(task) == ["IMAGE", "What?"]
    assert task.columns == {"truth": {"value": 7}, "prompt": "no", "answer": 7}


def test_of_two_different_questions_one_has_to_be_named(folder):
    row = TRL | {"instruction": "the blue button"}
    with pytest.raises(UserError, match="line 2 has different questions in the columns prompt and instruction; set"):
        load([TRL, row])
    assert load([row], prompt_key="instruction").tasks[0].messages[0]["content"][-1]["text"] == "the blue button"
    assert load([TRL | {"question": TRL["prompt"], "messages": TRL["prompt"]}]).tasks


def test_image_dir_json_and_byte_order_mark(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "green.png").write_bytes(png("#00ff00"))
    (folder / "list.json").write_text("\ufeff" + json.dumps([TRL | {"image": "green.png"}]), encoding="utf-8")
    (task,) = load_tasks(DataConfig(path="list.json", image_dir="sub")).tasks
    assert colours(task) == [(0, 255, 0)]
    assert len(load(["\ufeff" + json.dumps(TRL), "", "   ", json.dumps(TRL)]).tasks) == 2


def test_ids_are_unique_and_max_tasks_counts_good_rows(folder):
    rows = [TRL | {"id": "a"}, TRL | {"id": "a"}, TRL | {"id": 7}, TRL]
    ids = [task.id for task in load(rows).tasks]
    assert ids == ["a", "a (data.jsonl line 2)", "7", "data.jsonl line 4"]
    loaded = load(["broken", TRL, TRL, TRL], on_bad_row="skip", max_tasks=2)
    assert [task.id for task in loaded.tasks] == ["data.jsonl line 2", "data.jsonl line 3"]


def test_build_writes_a_missing_file_once(folder):
    (folder / "maker.py").write_text(
        "import json, pathlib\n"
        "def make(path, number):\n"
        "    pathlib.Path(path).write_text(json.dumps({'prompt': 'p', 'answer': number}))\n"
        "def nothing(path):\n    pass\n"
    )
    built = DataConfig(path="made.jsonl", build="maker.py:make", build_options={"number": 3})
    assert load_tasks(built).tasks[0].columns["answer"] == 3
    again = DataConfig(path="made.jsonl", build="maker.py:make", build_options={"number": 4})
    assert load_tasks(again).tasks[0].columns["answer"] == 3
    with pytest.raises(UserError, match="without writing"):
        load_tasks(DataConfig(path="other.jsonl", build="maker.py:nothing"))


BAD_ROWS = [
    ("{not json", "invalid_json", "data.jsonl line 2: not valid JSON"),
    ("[1, 2]", "invalid_json", "found list"),
    ({"image": "red.png", "answer": "7"}, "missing_prompt", "question is empty"),
    ({"prompt": "  ", "image": "red.png", "answer": "7"}, "missing_prompt", "blank"),
    ({"prompt": 3, "image": "red.png", "answer": "7"}, "bad_prompt", "int"),
    ({"prompt": [{"role": "user"}], "image": "red.png", "answer": "7"}, "bad_prompt", "role and a content"),
    ({"prompt": [{"role": "user", "content": [3]}], "image": "red.png", "answer": "7"}, "bad_prompt", "found 3"),
    ({"prompt": "What?", "image": "red.png"}, "missing_answer", "columns are: prompt, image"),
    ({"prompt": "What?", "image": "red.png", "answer": " "}, "missing_answer", "'answer'"),
    ({"prompt": "What?", "image": "red.png", "answer": float("nan")}, "missing_answer", "'answer'"),
    ({"prompt": "What?", "answer": "7"}, "missing_image", "text_only"),
    ({"prompt": "What?", "image": "", "answer": "7"}, "missing_image", "text_only"),
    ({"prompt": "What?", "image": "none.png", "answer": "7"}, "missing_image", "none.png"),
]


@pytest.mark.parametrize(("row", "kind", "message"), BAD_ROWS)
def test_bad_row_stops_or_is_skipped_and_counted(folder, row, kind, message):
    assert kind in TASK_ERRORS
    with pytest.raises(UserError, match="line 2") as caught:
        load([TRL, row, TRL])
    assert message in str(caught.value)
    assert "on_bad_row=skip" in str(caught.value)
    loaded = load([TRL, row, TRL], on_bad_row="skip")
    assert len(loaded.tasks) == 2
    assert loaded.skipped == {kind: 1}
    assert message in loaded.examples[kind]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problem": "<image><image>What?"}, "2 <image> places but the row has 1 image;"),
        ({"problem": "What?"}, "0 <image> places but the row has 1 image;"),
        ({"images": []}, "1 <image> place but the row has 0 images"),
        ({"images": None}, "1 <image> place but the row has 0 images"),
        ({"images": ["red.png", "blue.png"]}, "1 <image> place but the row has 2 images"),
        ({"problem": "<image><video>What?"}, "1 <video> place but the row has 0 videos"),
    ],
)
def test_placeholders_must_match_the_images(folder, change, message):
    loaded = load([EASYR1, EASYR1 | {"id": "r9"} | change], on_bad_row="skip")
    assert loaded.skipped == {"placeholder_mismatch": 1}
    assert message in loaded.examples["placeholder_mismatch"]
    assert "line 2 (id r9)" in loaded.examples["placeholder_mismatch"]


def test_images_both_in_the_chat_and_in_the_column(folder):
    prompt = [{"role": "user", "content": [{"type": "image", "image": "red.png"}, {"type": "text", "text": "?"}]}]
    with pytest.raises(UserError, match="use one of them"):
        load([{"prompt": prompt, "images": ["red.png"], "answer": "7"}])


def test_text_only_can_be_allowed_or_forbidden(folder):
    rows = [TRL, {"prompt": "1+1?", "answer": "2"}]
    assert len(load(rows, text_only=True).tasks) == 2
    assert len(load([{"prompt": "1+1?", "answer": "2"}]).tasks) == 1
    with pytest.raises(UserError, match="no image"):
        load([{"prompt": "1+1?", "answer": "2"}], text_only=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "path is not set"),
        ({"path": "dat.jsonl"}, "did you mean 'data.jsonl'.*the folder /.* contains: "),
        ({"path": "nowhere/at/all.jsonl"}, "does not exist either.*docs/data.md"),
        ({"path": "red.png"}, r"unknown extension '.png'; expected .jsonl, .json, .parquet"),
        ({"path": "empty.jsonl"}, "is empty"),
        ({"path": "empty.json"}, "is empty"),
        ({"path": "object.json"}, "expected a JSON list"),
        ({"path": "broken.json"}, "not valid JSON"),
        ({"path": "broken.parquet"}, "cannot be read as parquet"),
        ({"path": "data.jsonl", "prompt_key": "text"}, "columns are prompt, image, answer"),
        ({"path": "data.jsonl", "answer_key": "gold"}, "columns are prompt, image, answer"),
        ({"path": "data.jsonl", "image_key": "picture"}, "columns are prompt, image, answer"),
        ({"path": "data.jsonl", "on_bad_row": "ignore"}, "allowed: error, skip"),
        ({"path": "data.jsonl", "max_tasks": 0}, "max_tasks"),
        ({"path": "data.jsonl", "image_dir": "nowhere"}, "not a folder"),
        ({"path": "data.jsonl", "format_prompt": "Think."}, "never uses"),
        ({"path": "data.jsonl", "format_prompt": "{{ question }}"}, "question"),
        ({"path": "data.jsonl", "format_prompt": "{{ content"}, "format_prompt"),
        ({"path": "data.jsonl", "format_prompt": "none.jinja"}, "does not exist"),
        ({"path": "unnamed.jsonl"}, "no question column"),
        ({"path": "unanswered.jsonl"}, "no answer column"),
        ({"path": "two.jsonl"}, "both an image and an images column"),
        ({"path": "."}, "save_to_disk"),
        ({"path": "data.jsonl", "split": "test"}, r"data\.split is 'test', but data.jsonl is a single split"),
        ({"path": "data.jsonl", "subset": "b"}, r"data\.subset is 'b', but data.jsonl is not on the hub"),
        ({"path": ".", "subset": "b"}, r"data\.subset is 'b'"),
    ],
)
def test_mistakes_of_the_user(folder, cache, options, message):
    write([TRL])
    write([""], "empty.jsonl")
    write(["[]"], "empty.json")
    write(['{"prompt": 1}'], "object.json")
    write(["[1,"], "broken.json")
    write(["PAR1"], "broken.parquet")
    write([{"text": "What?"}], "unnamed.jsonl")
    write([{"problem": "What?"}], "unanswered.jsonl")
    write([TRL | {"images": ["red.png"]}], "two.jsonl")
    with pytest.raises(UserError, match=message):
        load_tasks(DataConfig(**options))


def test_nothing_left_is_an_error_with_counts(folder):
    rows = ["broken", "broken", TRL | {"answer": None}]
    with pytest.raises(UserError, match=r"2 invalid_json, 1 missing_answer.*not valid JSON"):
        load(rows, on_bad_row="skip")


def test_lines_that_are_not_utf8(folder):
    (folder / "latin.jsonl").write_bytes(json.dumps(TRL).encode() + b'\n{"prompt": "\xe9"}\n')
    with pytest.raises(UserError, match="line 2: not UTF-8"):
        load_tasks(DataConfig(path="latin.jsonl"))


def test_task_errors_survive_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(TaskError("missing_image", "t1", "no file")))
    assert (error.kind, error.place, str(error)) == ("missing_image", "t1", "t1: no file")


def problem_of(row, **options):
    """Message about a bad row, which is skipped while a good one is kept."""
    loaded = load([EASYR1, row], on_bad_row="skip", **options)
    assert len(loaded.tasks) == 1
    assert sum(loaded.skipped.values()) == 1
    with pytest.raises(UserError) as refused:
        load([EASYR1, row], **options)
    ((kind, message),) = loaded.examples.items()
    assert message in str(refused.value)
    assert "\n" not in message
    assert len(message) < 500
    return kind, message


@pytest.mark.parametrize(
    ("change", "kind", "part"),
    [
        ({"problem": "<image>half a \ud83d smile"}, "invalid_json", "column 'problem' contains U+D83D"),
        ({"answer": "\udc00"}, "invalid_json", "a lone surrogate"),
        ({"info": {"deep": ["\ud800"]}}, "invalid_json", "column 'info'"),
        ({"\ud800": 1}, "invalid_json", "U+D800"),
        ({"images": ["x" * 300 + ".png"]}, "missing_image", "too long for a file path"),
        ({"images": [base64.b64encode(png(size=(90, 90))).decode()]}, "missing_image", "data:image/png;base64,"),
        ({"images": ["a\0b.png"]}, "missing_image", "b.png not found"),
        ({"images": ["~nobody-of-this-name/a.png"]}, "missing_image", "a.png not found"),
        ({"problem": "<image>" + "word " * 120_000}, "long_prompt", "600000 characters, more than 200000"),
    ],
)
def test_rows_that_no_model_can_read(change, kind, part, folder):
    found, message = problem_of({**EASYR1, **change})
    assert found == kind
    assert part in message


def test_a_long_line_never_comes_into_memory(folder, monkeypatch):
    monkeypatch.setattr(tables, "LONGEST_LINE", 1_500_000)
    long = json.dumps({**EASYR1, "padding": "x" * 3_000_000})
    kind, message = problem_of(long)
    assert kind == "invalid_json"
    assert message.endswith("line 2: the line has more than 1.5 MB")
    assert [task.id for task in load([long, EASYR1], on_bad_row="skip").tasks] == ["data.jsonl line 2"]


def test_the_pixel_limit_reaches_the_images(folder):
    (task,) = load([EASYR1], max_image_pixels=47).tasks
    with pytest.raises(TaskError, match=r"8 x 6 pixels, more than 47 \(data\.max_image_pixels\)"):
        task.load_images()
    with pytest.raises(TaskError, match="8 x 6 pixels"):
        VlmTask("made", [], [Image.new("RGB", (8, 6))], max_image_pixels=47).load_images()
    (task,) = load([EASYR1], max_image_pixels=48).tasks
    assert colours(task) == [RED]


def test_a_builder_needs_a_file_of_its_kind(folder):
    config = DataConfig(path="questions", build="mmrl.vlm.toy.digits:build_questions", build_options={"count": 2})
    with pytest.raises(UserError, match=r"are written to a \.jsonl file.*questions"):
        load_tasks(config)
    assert not (folder / "questions").exists()
