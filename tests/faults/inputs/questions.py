"""Damaged questions: rows, images and videos, through the readers and the encoding of prompts."""

import copy
import io
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.faults.batches import Kind, Verdict, of_call
from tests.faults.damage import damage_bytes, damage_text, damage_tree

__all__ = ["KINDS"]

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "ICO", "TGA")
TRL_ROW = {
    "prompt": [
        {"role": "system", "content": "You see."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is 3 plus 4?"}]},
    ],
    "image": "0.png",
    "solution": "7",
    "kind": "add",
}


@dataclass
class _Lab:
    folder: Path
    rows: list[dict[str, Any]]
    processor: Any = None
    layout: Any = None


def _prepare(folder: Path) -> _Lab:
    from tests.vlm.runs import write_questions

    path = write_questions(folder / "data")
    return _Lab(folder / "data", [json.loads(line) for line in path.open()])


def _prepare_model(folder: Path) -> _Lab:
    from mmrl.vlm.data.prompt import PromptLayout
    from mmrl.vlm.families.family import grid_tables
    from mmrl.vlm.model.processor import load_processor
    from tests.contracts.domains import tiny_vlm

    lab = _prepare(folder)
    lab.processor = load_processor(str(tiny_vlm()))
    lab.layout = PromptLayout(14, 512, "the limit", 2, grid_tables(2, 2.0))
    return lab


def _rows(lab: _Lab, rng: random.Random, folder: Path) -> Verdict:
    rows = [dict(TRL_ROW) for _ in range(3)] if rng.random() < 0.3 else copy.deepcopy(lab.rows[:3])
    text = "".join(json.dumps(row) + "\n" for row in _damaged_rows(rng, rows))
    text = damage_text(rng, text) if rng.random() < 0.3 else text
    name = rng.choice(("rows.jsonl", "rows.jsonl", "rows.jsonl", "rows.json"))
    (folder / name).write_bytes(text.encode(errors="surrogatepass"))
    return of_call(lambda: _load(lab, folder / name, rng.choice(("skip", "error"))))


def _damaged_rows(rng: random.Random, rows: list[Any]) -> list[Any]:
    place = rng.randrange(len(rows))
    if rng.random() < 0.2:
        rows[place]["problem"] = damage_text(rng, str(rows[place].get("problem", "<image>")) * rng.choice((1, 50)))
    else:
        rows[place] = damage_tree(rng, rows[place], ("images", "image", "problem", "prompt", "answer", "videos", "id"))
    return rows


def _load(lab: _Lab, path: Path, on_bad_row: str) -> None:
    from mmrl.vlm.data.dataset import DataConfig, load_tasks
    from mmrl.vlm.data.task import TaskError

    config = DataConfig(path=str(path), image_dir=str(lab.folder), on_bad_row=on_bad_row)
    for task in load_tasks(config).tasks:
        try:
            task.load_images()
        except TaskError:  # the rollout counts it and goes on
            continue


def _encoded_rows(lab: _Lab, rng: random.Random, folder: Path) -> Verdict:
    """Rows whose questions are also turned into tokens."""
    from mmrl.vlm.data.dataset import DataConfig, load_tasks
    from mmrl.vlm.data.prompt import encode_prompt
    from mmrl.vlm.data.task import TaskError

    rows = _damaged_rows(rng, copy.deepcopy(lab.rows[:2]))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_bytes(text.encode(errors="surrogatepass"))
    config = DataConfig(path=str(folder / "rows.jsonl"), image_dir=str(lab.folder), on_bad_row="skip")

    def encode() -> None:
        for task in load_tasks(config).tasks:
            encode_prompt(task, lab.processor, lab.layout)

    return of_call(encode, skips=(TaskError,))


def _images(lab: _Lab, rng: random.Random, folder: Path) -> Verdict:
    from mmrl.vlm.data.task import TaskError, open_image

    kind = rng.choice(FORMATS)
    mode = rng.choice(("RGB", "L", "P", "RGBA", "1")) if kind in ("PNG", "TIFF", "GIF") else "RGB"
    picture, buffer = Image.fromarray(np.random.RandomState(0).randint(0, 256, (24, 20, 3), np.uint8)), io.BytesIO()
    picture.convert(mode).save(buffer, format=kind)
    data = damage_bytes(rng, buffer.getvalue())
    path = folder / "picture.png"
    path.write_bytes(data)
    source: Any = rng.choice((str(path), data, {"bytes": data, "path": None}))
    return of_call(lambda: open_image(source, "q1"), skips=(TaskError,))


def _prepare_videos(folder: Path) -> _Lab:
    from mmrl.hub.video_writing import write_mp4

    lab = _prepare_model(folder)
    frames = np.random.RandomState(0).randint(0, 256, (8, 32, 32, 3), np.uint8)
    write_mp4(folder / "data/sound.mp4", frames, fps=8)
    return lab


def _videos(lab: _Lab, rng: random.Random, folder: Path) -> Verdict:
    from mmrl.vlm.data.prompt import encode_prompt
    from mmrl.vlm.data.task import TaskError, VlmTask

    path = folder / "film.mp4"
    path.write_bytes(damage_bytes(rng, (lab.folder / "sound.mp4").read_bytes(), head=256))
    content = [{"type": "video"}, {"type": "text", "text": "What is 3 plus 4?"}]
    task = VlmTask("q1", [{"role": "user", "content": content}], videos=[str(path)])
    return of_call(lambda: encode_prompt(task, lab.processor, lab.layout), skips=(TaskError,))


KINDS = (
    Kind("rows", _prepare, _rows, share=6),
    Kind("encoded rows", _prepare_model, _encoded_rows, share=1),
    Kind("question images", _prepare, _images, share=5),
    Kind("videos", _prepare_videos, _videos, share=0.5),
)
