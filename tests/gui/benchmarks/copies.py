"""Small copies of each benchmark in its published format, made up: a screen with rectangles, one row each."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

WIDTH, HEIGHT = 320, 200
BOXES = [(10, 20, 50, 40), (200, 120, 280, 160), (100, 60, 140, 90), (250, 10, 310, 30), (30, 150, 90, 190)]
"""Corners of five elements; three lie so far right or down that their corners are no left, top, width and height."""


def write_screen(path: Path, boxes: Sequence[tuple[int, ...]] = BOXES) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    for number, box in enumerate(boxes):
        draw.rectangle(box, fill=(60 * number % 256, 120, 200))
    image.save(path)
    return path


def xywh(box: Sequence[float]) -> list[float]:
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def relative(box: Sequence[float]) -> list[float]:
    return [box[0] / WIDTH, box[1] / HEIGHT, box[2] / WIDTH, box[3] / HEIGHT]


def write_json(path: Path, rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def screenspot(folder: Path, suffix: str = "", images: str = "screenspot_imgs") -> Path:
    write_screen(folder / images / "screen.png")
    for platform, source in (("mobile", "ios"), ("desktop", "windows"), ("web", "shop")):
        rows = [
            {
                "img_filename": "screen.png",
                "bbox": xywh(box),
                "instruction": f"element {number}",
                "data_type": ("text", "icon")[number % 2],
                "data_source": source,
            }
            for number, box in enumerate(BOXES)
        ]
        write_json(folder / f"screenspot_{platform}{suffix}.json", rows)
    return folder


def screenspot_v2(folder: Path) -> Path:
    return screenspot(folder, "_v2", "screenspotv2_image")


def screenspot_parquet(folder: Path) -> Path:
    """The mirror on a hub of data sets: images inside, corners as fractions."""
    import datasets

    screen = write_screen(folder.parent / "screen.png").read_bytes()
    sources = ["ios", "windows", "shop", "macos", "android"]
    columns = {
        "file_name": [f"{number}.png" for number in range(len(BOXES))],
        "bbox": [relative(box) for box in BOXES],
        "instruction": [f"element {number}" for number in range(len(BOXES))],
        "data_type": ["text", "icon", "text", "icon", "text"],
        "data_source": sources,
        "image": [{"bytes": screen, "path": None}] * len(BOXES),
    }
    features = datasets.Features(
        {
            **{name: datasets.Value("string") for name in ("file_name", "instruction", "data_type", "data_source")},
            "bbox": datasets.Sequence(datasets.Value("float64")),
            "image": datasets.Image(),
        }
    )
    path = folder / "data" / "test-00000-of-00001.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns, features=features).to_parquet(str(path))
    return folder


def screenspot_pro(folder: Path) -> Path:
    write_screen(folder / "images" / "excel" / "screen.png")
    for application, group in (("excel", "Office"), ("blender", "Creative")):
        rows = [
            {
                "id": f"{application}_{number}",
                "img_filename": "excel/screen.png",
                "img_size": [WIDTH, HEIGHT],
                "bbox": list(box),
                "instruction": f"element {number}",
                "instruction_cn": f"元素 {number}",
                "application": application,
                "platform": "windows",
                "group": group,
                "ui_type": ("text", "icon")[number % 2],
            }
            for number, box in enumerate(BOXES)
        ]
        write_json(folder / "annotations" / f"{application}_windows.json", rows)
    return folder


def mmbench_gui_l2(folder: Path) -> Path:
    rows = []
    for number, box in enumerate(BOXES):
        platform = ("os_windows", "os_android")[number % 2]
        write_screen(folder / "offline_images" / platform / "screen.png")
        for level in ("basic", "advanced"):
            rows.append(
                {
                    "index": f"{level}-{number}",
                    "image_path": "screen.png",
                    "platform": platform,
                    "image_size": [WIDTH, HEIGHT],
                    "instruction": f"element {number}",
                    "bbox": relative(box),
                    "data_type": ("text", "icon")[number // 2 % 2],
                    "grounding_type": level,
                    "app_name": "mail",
                }
            )
    write_json(folder / "L2_annotations.json", rows)
    return folder


def ui_vision(folder: Path) -> Path:
    """The first box of each setting has its corners swapped."""
    write_screen(folder / "images" / "element_grounding" / "screen.png")
    for setting in ("basic", "functional", "spatial"):
        rows = [
            {
                "image_path": "element_grounding/screen.png",
                "image_size": [WIDTH, HEIGHT],
                "prompt_to_evaluate": f"element {number}",
                "bbox": list(box) if number else [box[2], box[3], box[0], box[1]],
                "platform": ("GIMP", "Chromium")[number % 2],
                "element_type": "Icon",
            }
            for number, box in enumerate(BOXES)
        ]
        write_json(folder / "annotations" / "element_grounding" / f"element_grounding_{setting}.json", rows)
    return folder


def osworld_g(folder: Path, name: str = "OSWorld-G.json") -> Path:
    write_screen(folder / "images" / "screen.png")
    common = {"image_path": "screen.png", "image_size": [WIDTH, HEIGHT], "GUI_types": ["Button", "Icon"]}
    rows = [
        {"id": f"s-{number}", "instruction": f"element {number}", "box_type": "bbox", "box_coordinates": xywh(box)}
        for number, box in enumerate(BOXES)
    ]
    rows.append({"id": "s-p", "instruction": "the triangle", "box_type": "polygon", "box_coordinates": TRIANGLE})
    rows.append({"id": "s-r", "instruction": "what is not there", "box_type": "refusal", "box_coordinates": [0] * 4})
    write_json(folder / name, [row | common for row in rows])
    categories = {"text_matching": [{"id": "s-0"}, {"id": "s-1"}], "layout": [{"id": "s-1"}, {"id": "s-p"}]}
    write_json(folder / "classification_result.json", {"classified": categories})
    return folder


def osworld_g_refined(folder: Path) -> Path:
    return osworld_g(folder, "OSWorld-G_refined.json")


def ui_i2e(folder: Path) -> Path:
    write_screen(folder / "images" / "screen.png")
    rows = [
        {
            "image": "images/screen.png",
            "instruction": f"element {number}",
            "bounding_box": list(box),
            "annotations": {"instr_type": ("explicit", "implicit")[number % 2]},
            "source": "web",
        }
        for number, box in enumerate(BOXES)
    ]
    path = folder / "I2E-bench-annotation.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


TRIANGLE = [0, 0, 40, 0, 0, 40]

COPIES: dict[str, Callable[[Path], Path]] = {
    "screenspot": screenspot,
    "screenspot_v2": screenspot_v2,
    "screenspot_pro": screenspot_pro,
    "mmbench_gui_l2": mmbench_gui_l2,
    "ui_vision": ui_vision,
    "osworld_g": osworld_g,
    "osworld_g_refined": osworld_g_refined,
    "ui_i2e": ui_i2e,
}
