"""Damaged data sets: prompts, captioned images, demonstrations."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.batches import Kind, Verdict, of_call
from tests.faults.damage import damage_bytes, damage_text, damage_tree, strange_value

__all__ = ["KINDS"]

PROMPTS = ("a red circle", "two blue squares", "a green triangle above a red square")
DTYPES = (np.uint8, np.float32, np.int64, np.bool_, np.complex64, "U5", "S3", "datetime64[s]")


def _nothing(folder: Path) -> None:
    return None


def _prompts(_: None, rng: random.Random, folder: Path) -> Verdict:
    from diffusion.data.prompts import PromptConfig, load_prompts

    rows = [{"prompt": text, "metadata": {"tag": "single"}} for text in PROMPTS]
    text = "\n".join(PROMPTS)
    path = folder / rng.choice(("prompts.txt", "prompts.jsonl", "prompts.json", "prompts.parquet", "prompts"))
    if path.suffix != ".txt":
        place = rng.randrange(len(rows))
        damaged: list[Any] = [*rows[:place], damage_tree(rng, rows[place], ("prompt",)), *rows[place + 1 :]]
        text = json.dumps(damaged) if path.suffix == ".json" else "\n".join(json.dumps(row) for row in damaged)
    text = damage_text(rng, text) if rng.random() < 0.5 else text
    path.write_bytes(text.encode(errors="surrogatepass"))
    config = PromptConfig(path=str(path), on_bad_row=rng.choice(("skip", "error")))
    return of_call(lambda: [task.prompt.encode() for task in load_prompts(config).tasks])


def _images(_: None, rng: random.Random, folder: Path) -> Verdict:
    from diffusion.data.captioned_images import ImageDataConfig, load_images

    path = folder / rng.choice(("images.npz", "images.npz", "images.jsonl"))
    (_write_packed if path.suffix == ".npz" else _write_listed)(rng, path)
    config = ImageDataConfig(path=str(path))
    return of_call(lambda: [(image.caption.encode(), image.read().shape) for image in load_images(config)])


def _write_packed(rng: random.Random, path: Path) -> None:
    parts: dict[str, Any] = {"images": np.zeros((3, 8, 8, 3), np.uint8), "captions": np.array(PROMPTS)}
    if rng.random() < 0.5:
        key = rng.choice(list(parts))
        shape = tuple(rng.choice((0, 1, 2, 3, 8)) for _ in range(rng.randint(0, 5)))
        parts[rng.choice((key, "picture"))] = np.zeros(shape, rng.choice(DTYPES))
        if rng.random() < 0.3:
            del parts[key]
    if rng.random() < 0.05:
        parts["captions"] = np.array([strange_value(rng), "x", None], object)
    np.savez(path, **parts)
    if rng.random() < 0.6:
        path.write_bytes(damage_bytes(rng, path.read_bytes(), head=128))


def _write_listed(rng: random.Random, path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (8, 8)).save(path.parent / "0.png")
    if rng.random() < 0.5:
        (path.parent / "0.png").write_bytes(damage_bytes(rng, (path.parent / "0.png").read_bytes()))
    rows: list[Any] = [{"image": "0.png", "prompt": text} for text in PROMPTS]
    rows[1] = damage_tree(rng, rows[1], ("image", "prompt"))
    text = "\n".join(json.dumps(row) for row in rows)
    text = damage_text(rng, text) if rng.random() < 0.3 else text
    path.write_bytes(text.encode(errors="surrogatepass"))


def _prepare_demonstrations(folder: Path) -> Path:
    from tests.robotics.line_demos import demonstrate

    return demonstrate(folder / "demos", camera="front")


def _demonstrations(sound: Path, rng: random.Random, folder: Path) -> Verdict:
    from robotics.episodes.demonstrations import DemonstrationConfig, load_demonstrations

    path = folder / "demos"
    shutil.copytree(sound, path)
    file = rng.choice(sorted(one for one in path.rglob("*") if one.is_file() and "README" not in one.name))
    if file.suffix == ".json" and rng.random() < 0.7:
        content = damage_tree(rng, json.loads(file.read_text()), ("fps", "features", "total_episodes", "data_path"))
        file.write_text(json.dumps(content))
    elif file.suffix == ".parquet" and rng.random() < 0.6:
        _damage_table(rng, file)
    elif rng.random() < 0.1:
        file.unlink()
    else:
        file.write_bytes(damage_bytes(rng, file.read_bytes()))
    return of_call(lambda: _use(load_demonstrations(DemonstrationConfig(path=str(path), camera="front"))))


def _damage_table(rng: random.Random, file: Path) -> None:
    """Change a table's cells or columns and write it as a valid file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sound, rows = file.read_bytes(), pq.read_table(file).to_pylist()
    place = rng.randrange(len(rows))
    key = rng.choice(list(rows[place]))
    for row in rows if rng.random() < 0.5 else rows[place : place + 1]:
        if rng.random() < 0.2:
            row.pop(key, None)
        else:
            row[key] = strange_value(rng)
    try:
        pq.write_table(pa.Table.from_pylist(rows), file)
    except Exception:  # a value that no parquet file can hold
        file.write_bytes(damage_bytes(rng, sound))


def _use(demonstrations: Any) -> None:
    transitions = demonstrations.transitions[:3]
    demonstrations.observations(transitions)
    demonstrations.chunks(transitions, 2)
    demonstrations.statistics()


KINDS = (
    Kind("prompts", _nothing, _prompts, share=3),
    Kind("captioned images", _nothing, _images, share=3),
    Kind("demonstrations", _prepare_demonstrations, _demonstrations, share=2),
)
