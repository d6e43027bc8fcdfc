"""Rows of questions, and what is read back of them."""

import io
import json

from PIL import Image

from mmrl.vlm.data.dataset import DataConfig, load_tasks


def png(colour="red", size=(8, 6), mode="RGB"):
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def write(rows, name="data.jsonl"):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    with open(name, "w", encoding="utf-8") as file:
        file.write("\n".join(lines))
    return name


def load(rows, **options):
    return load_tasks(DataConfig(path=write(rows), **options))


def layout(task):
    """The content of the last turn, media items by their type and texts as they are."""
    return [item.get("text", item["type"].upper()) for item in task.messages[-1]["content"]]


def colours(task):
    return [image.getpixel((0, 0)) for image in task.load_images()]


RED, BLUE = (255, 0, 0), (0, 0, 255)
TRL = {"prompt": "What?", "image": "red.png", "answer": "7"}
EASYR1 = {"problem": "<image>What?", "images": ["red.png"], "answer": "7"}
