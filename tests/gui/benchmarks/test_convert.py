"""`mmrl gui convert`: rows of other projects become rows that training reads, and contradictions are named."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mmrl.cli import main
from mmrl.errors import UserError
from mmrl.gui.benchmarks.benchmark_copies import validate
from mmrl.gui.benchmarks.convert import OWN_COLUMNS, READ_COLUMNS, SOURCES, convert
from mmrl.gui.benchmarks.convert_command import KINDS
from mmrl.vlm.data.dataset import CHAT_KEYS, IMAGE_KEYS, PROMPT_KEYS, VIDEO_KEYS, DataConfig, load_tasks

SIZE = (1600, 800)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shots").mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", SIZE, "white").save(tmp_path / "shots" / name)
    return tmp_path


def written(folder, source, rows, name="in.json", **options):
    file = folder / name
    if name.endswith(".jsonl"):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        file.write_text(json.dumps(rows))
    out = folder / "rows" / "out.jsonl"
    result = convert(file, out, source, images=folder / "shots", **options)
    return [json.loads(line) for line in out.read_text().splitlines()], result


def click(**columns):
    return {"image": "a.png", "instruction": "Save"} | columns


PLAIN = {
    "rel1": {"bbox": [0.25, 0.5, 0.5, 0.625]},
    "rel1000": {"bbox": [250, 500, 500, 625]},
    "xywh": {"bbox": [400, 400, 400, 100]},
    "showui": {"bbox": [0.25, 0.5, 0.5, 0.625], "point": [0.3, 0.55]},
}


@pytest.mark.parametrize("source", PLAIN)
def test_boxes_of_every_convention_are_the_same_pixels(folder, source):
    rows, result = written(folder, source, [click(**PLAIN[source], data_type="icon", id=7)])
    (row,) = rows
    assert row["bbox"] == [400, 400, 800, 500]
    assert (row["instruction"], row["original_wh"], row["data_type"], row["source_id"]) == ("Save", [*SIZE], "icon", 7)
    assert (folder / "rows" / row["image"]).resolve() == folder / "shots" / "a.png"
    assert (result.rows, result.without_target) == (1, 0)


def test_images_are_found_from_a_folder_that_is_a_link(folder):
    (folder / "disk" / "deep").mkdir(parents=True)
    (folder / "rows").symlink_to(folder / "disk" / "deep")
    ((row,), _) = written(folder, "xywh", [click(**PLAIN["xywh"])])
    assert (folder / "rows" / row["image"]).is_file()


@pytest.mark.parametrize(("source", "point"), [("rel1", [0.25, 0.5]), ("rel1000", [250, 500]), ("xywh", [400, 400])])
def test_points_and_their_radius(folder, source, point):
    (row,), _ = written(folder, source, [click(point=point)], radius=0.1)
    assert row["point"] == [400, 400]
    assert row["radius"] == pytest.approx(0.1 * (1600**2 + 800**2) ** 0.5, rel=1e-12)


def test_no_column_of_the_source_takes_the_place_of_the_instruction(folder):
    others = {"prompt": "P", "question": "Q", "images": ["b.png"], "answers": ["yes"], "kind": "icon"}
    ((row,), _) = written(folder, "rel1", [click(bbox=[0.25, 0.5, 0.5, 0.625], **others)])
    assert (row["source_prompt"], row["source_answers"], row["kind"]) == ("P", ["yes"], "icon")
    (task,) = load_tasks(DataConfig(path=str(folder / "rows" / "out.jsonl"))).tasks
    assert task.messages[-1]["content"][-1]["text"] == "Save"
    assert {*PROMPT_KEYS, *CHAT_KEYS, *IMAGE_KEYS, *VIDEO_KEYS} <= {*READ_COLUMNS, *OWN_COLUMNS}


def test_a_click_in_capitals_needs_a_place(folder):
    with pytest.raises(UserError, match="no column point"):
        written(folder, "rel1", [click(action="CLICK")])


def test_gui_r1_as_published(folder):
    content = io.BytesIO()
    Image.new("RGB", SIZE, "red").save(content, "JPEG")
    image = {"bytes": content.getvalue(), "path": None}
    steps = [
        ("click", [0.25, 0.5, 0.5, 0.625], "no input text"),
        ("click", [0.25, 0.5], "no input text"),
        ("TYPE", [-100.0, -100.0], "hello"),
    ]
    table = [
        {
            "image": image,
            "instruction": "go",
            "history": "None",
            "task_type": "high",
            "gt_action": action,
            "gt_bbox": box,
            "gt_input_text": text,
        }
        for action, box, text in steps
    ]
    kinds = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    texts = ("instruction", "history", "task_type", "gt_action", "gt_input_text")
    columns = [(name, pa.string()) for name in texts]
    schema = pa.schema([("image", kinds), ("gt_bbox", pa.list_(pa.float64())), *columns])
    pq.write_table(pa.Table.from_pylist(table, schema), folder / "train.parquet")
    out = folder / "out.jsonl"
    result = convert(folder / "train.parquet", out, "gui_r1")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["action"] for row in rows] == ["click", "click", "type"]
    assert rows[0]["bbox"] == [400, 400, 800, 500]
    assert (rows[1]["point"], rows[1]["radius"]) == ([400, 400], 0)
    assert rows[2]["no_target"] is True
    assert (rows[2]["input_text"], rows[2]["history"]) == ("hello", "None")
    assert result.without_target == 1
    # one screen in three rows is one file, byte for byte
    (file,) = (folder / "out-images").iterdir()
    assert file.read_bytes() == content.getvalue()
    assert {row["image"] for row in rows} == {f"out-images/{file.name}"}
    assert file.suffix == ".jpeg"
    found = validate(str(out))
    assert (found.rows, found.malformed, found.refusal) == (3, [], "")


def test_ui_r1_as_published(folder):
    rows, _ = written(
        folder,
        "ui_r1",
        [
            {"img_filename": "a.png", "instruction": "Save", "bbox": [400, 400, 800, 500]},
            {"img_filename": "b.png", "instruction": "back", "action": "navigate_back"},
        ],
    )
    assert [(row["action"], row.get("bbox"), row.get("no_target")) for row in rows] == [
        ("click", [400, 400, 800, 500], None),
        ("navigate_back", None, True),
    ]


def test_showui_screens_have_many_elements(folder):
    elements = [{"instruction": name, "bbox": [0.25, 0.5, 0.5, 0.625]} for name in ("Save", "Open")]
    screen = {
        "img_url": "a.png",
        "img_size": [*SIZE],
        "element": [*elements, {"instruction": "x", "point": [0.5, 0.5]}],
    }
    rows, result = written(folder, "showui", [screen])
    assert [row["instruction"] for row in rows] == ["Save", "Open", "x"]
    assert rows[1]["bbox"] == [400, 400, 800, 500]
    assert rows[2]["point"] == [800, 400]
    assert result.rows == 3
    assert len({row["id"] for row in rows}) == 3


def talk(*said, key="messages", task="Buy a CD"):
    role, text = ("role", "content") if key == "messages" else ("from", "value")
    turns = [{role: "user", text: f"You are a GUI agent.\n\n## User Instruction\n{task}\n<image>"}]
    for answer in said:
        turns += [{role: "assistant" if key == "messages" else "gpt", text: answer}, {role: "user", text: "<image>"}]
    return {key: turns[:-1], "images": ["a.png"] * (len(said) - 1) + ["b.png"]}


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_the_last_turn_of_ui_tars_is_the_step(folder, key):
    first = "Thought: a\nAction: click(start_box='<|box_start|>(495,30),(495,30)<|box_end|>')"
    rows, _ = written(
        folder,
        "ui_tars",
        [
            talk(first, "Action: click(start_box='<|box_start|>(250,500)<|box_end|>')", key=key),
            talk("Action: press_back()", key=key),
            talk("Action: type(content='rock')", key=key),
            talk("Action: scroll(start_box='(500,500)', direction='down')", key=key),
            talk("Action: finished(content='12')", key=key),
            talk("Action: drag(start_box='(1,2)', end_box='(3,4)')", key=key),
        ],
    )
    assert [row["action"] for row in rows] == ["click", "press_back", "type", "scroll", "finish", "drag"]
    assert rows[0]["instruction"] == "Buy a CD"
    assert (rows[0]["point"], rows[0]["history"]) == ([400, 400], first)
    assert rows[0]["image"].endswith("b.png")
    assert rows[3]["point"] == [800, 400]
    assert [row["input_text"] for row in rows[1:]] == [None, "rock", "down", "12", None]
    assert [row.get("no_target") for row in rows[1:]] == [True, True, None, True, True]


MIXED = [
    ("rel1", [{"bbox": [0.1, 0.1, 0.2, 0.2]}, {"bbox": [100, 100, 200, 200]}], "row 2: .* are not fractions"),
    (
        "rel1000",
        [{"bbox": [100, 100, 200, 200]}, {"bbox": [0.1, 0.1, 0.2, 0.2]}],
        "row 2: .* are fractions, not thousa",
    ),
    ("rel1000", [{"bbox": [100, 100, 1200, 200]}], "row 1: .* are not thousandths"),
    ("xywh", [{"bbox": [0.1, 0.1, 0.2, 0.2]}], "row 1: .* are fractions, not pixels"),
    ("xywh", [{"bbox": [900, 300, 1500, 700]}], "boxes fit xywh, 100.0% fit xyxy.*do not fit: in.json row 1"),
    (
        "xywh",
        [{"bbox": [900, 300, 600, 200]}, {"bbox": [900, 300, 1500, 700]}] * 2,
        "different conventions.*row 1, .*row 3.*row 2, .*row 4",
    ),
    ("rel1", [{"bbox": [0.5, 0.5, 0.2, 0.2]}], "fit xyxy_relative, 100.0% fit xywh_relative"),
    ("xywh", [{"point": [1700, 3]}], "outside the image of 1600 x 800"),
    (
        "rel1",
        [{"bbox": [0.1, 0.1, 0.2, 0.2], "img_size": [800, 1600]}],
        "says 800 x 1600 pixels, but its image has 1600",
    ),
]


@pytest.mark.parametrize(("source", "targets", "message"), MIXED)
def test_contradictions_name_row_and_file_and_write_nothing(folder, source, targets, message):
    rows = [click(**target) for target in targets]
    with pytest.raises(UserError, match=rf"in\.json.*{message}"):
        written(folder, source, rows, skip_bad_rows=True)
    assert [path.name for path in (folder / "rows").iterdir()] == []


def test_pixels_of_ui_tars_are_no_thousandths(folder):
    with pytest.raises(UserError, match=r"in\.json: 1 row contradicts --from ui_tars .*1200.* are not thousandths"):
        written(folder, "ui_tars", [talk("Action: click(start_box='(1200,30)')")])


BAD = [
    (
        "gui_r1",
        {"image": "a.png", "instruction": "x", "gt_action": "type", "gt_input_text": " "},
        "gt_input_text is ' '",
    ),
    ("gui_r1", {"image": "a.png", "instruction": "x", "gt_action": "click"}, "no column gt_bbox"),
    ("ui_r1", {"img_filename": "c.png", "instruction": "x", "bbox": [1, 2, 3, 4]}, "there is no image c.png"),
    ("ui_r1", {"img_filename": "a.png", "instruction": "x", "action": "click"}, "click, but there is no bbox"),
    (
        "ui_r1",
        {"img_filename": "a.png", "instruction": "x", "action": "scroll", "bbox": [1, 2, 3, 4]},
        "there is a bbox, but the action is 'scroll' instead of click",
    ),
    ("rel1", click(bbox=[0.1, 0.2, 0.3]), "bbox has 3 numbers; expected 4"),
    ("rel1", click(), "no column point"),
    ("ui_tars", talk("Action: fly()"), "no action of UI-TARS"),
    ("ui_tars", talk("Action: click()"), "click, but there is no point"),
    ("ui_tars", talk("Action: wait()\n\nwait()"), "has 2 actions; a step has one"),
    ("showui", {"img_url": "a.png", "element": 3}, "element is 3; expected a list"),
]


@pytest.mark.parametrize(("source", "row", "message"), BAD)
def test_unreadable_rows_are_errors_unless_they_are_skipped(folder, source, row, message):
    with pytest.raises(UserError, match=rf"in\.jsonl: in\.jsonl line 1: .*{message}"):
        written(folder, source, [row], "in.jsonl")
    with pytest.raises(UserError, match="no usable rows; skipped: 1"):
        written(folder, source, [row], "in.jsonl", skip_bad_rows=True)


def test_the_command_converts_and_lists_what_it_left_out(folder, capsys):
    rows = [click(bbox=[250, 500, 500, 625]), click(), {"image": "b.png", "instruction": "x", "action": "wait"}]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = folder / "out.jsonl"
    words = [
        "gui",
        "convert",
        str(folder / "in.jsonl"),
        str(out),
        "--from",
        "rel1000",
        "--images",
        str(folder / "shots"),
    ]
    assert main(words) == 2
    assert "--skip-bad-rows leaves such rows out" in capsys.readouterr().err
    assert not out.exists()
    assert main([*words, "--skip-bad-rows"]) == 0
    said = capsys.readouterr().out
    assert "2 rows, 1 of them steps without a target" in said
    assert "in.jsonl line 2: no column point" in said
    assert main(words) == 2
    assert "already exists" in capsys.readouterr().err


def test_the_command_offers_every_source():
    assert set(KINDS) == set(SOURCES)
