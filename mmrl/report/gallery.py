"""Samples in the report: questions with their answers, images drawn for the same prompts and seeds, videos."""

from __future__ import annotations

import base64
import io
import itertools
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mmrl.files import is_file, read_file
from mmrl.report.charts import CONTROL, save_png, shown_text
from mmrl.report.folder import read_run, repeated_end
from mmrl.runs.records import FILM_RATE, STEP_NAME, SampleRecord, film_frames, read_samples, sample_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL.Image import Image


VIDEO_BYTES = 2_000_000
"""Maximum size of all embedded videos of a page in bytes; further videos are only listed."""
MOST_VIDEOS = 12
ROLLOUT_TASKS = 6
ROLLOUT_STEPS = 6
ROLLOUT_BYTES = 1_500_000
"""Maximum size of the images of all shown rollouts in bytes; beyond it, earlier steps are omitted."""
PNG_BYTES = 60_000
"""Size in bytes above which an image of a question is stored as JPEG."""
SAMPLES_PER_TASK = 8
COMPARED_TASKS = 12
TEXT_LIMIT = 4000
IMAGE_SIDE = 448
DRAWN_SIDE = 256
FILM_SIDE = 128
FILM_FRAMES = 16
"""Maximum number of frames of a film strip on the page."""
PIXELATED_BELOW = 128
PIXELATED_SIDE = 96
_REPEATED_MARK = re.compile(r"(<\|[^<>|]+\|>)\1+")
_MARK = re.compile(r"<\|[^<>|]+\|>")
_USER_TURN = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
_EMPTINESS = re.compile(r"\n[^\S\n]*\n\s*|[^\S\n]{3,}|[^\S\n ]")
"""Blank lines, three or more spaces, and whitespace other than spaces and line breaks."""
GRID_PROMPTS = 12
GRID_IMAGES = 4
GRID_DURING = 2
FILE_PROMPTS = 8
FILE_IMAGE_INCHES = 0.75


def videos_of(folder: Path) -> list[dict[str, Any]]:
    """The videos of a run's first and last evaluation with stored videos."""
    kept = _first_and_last(folder.glob("videos/*.mp4"))
    shown, left = [], VIDEO_BYTES
    for path in kept[:MOST_VIDEOS]:
        size = path.stat().st_size
        fits = size <= left
        left -= size if fits else 0
        shown.append({"title": path.stem.replace("-", " "), "source": _embedded(path) if fits else None})
    return shown


def clouds_of(folder: Path, page: Path) -> list[dict[str, str]]:
    """Links from a page to the point clouds of a run's first and last evaluation with stored clouds."""
    kept = _first_and_last(folder.glob("clouds/*.html"))
    start = page.parent.resolve()
    return [
        {"title": path.stem.replace("-", " "), "link": quote(Path(os.path.relpath(path.resolve(), start)).as_posix())}
        for path in kept
    ]


def _first_and_last(paths: Iterable[Path]) -> list[Path]:
    """The files of the first and the last step among those named after a step."""
    files = sorted(path for path in paths if STEP_NAME.match(path.name) and is_file(path))
    steps = sorted({_step(path) for path in files})
    return [path for path in files if _step(path) in (steps[0], steps[-1])]


def _step(path: Path) -> int:
    found = STEP_NAME.match(path.name)
    assert found is not None
    return int(found[1])


def _embedded(path: Path) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(read_file(path)).decode()}"


def sample_gallery(run_dir: Path) -> list[dict[str, Any]]:
    """Rollouts of a few training steps in ascending order, including the last step with stored ones, task by task.

    Earlier steps are shown as long as all pictures together stay small.
    """
    steps = sample_steps(run_dir, "train")
    kept = [*steps[:1], *_spread(steps[1:-1], ROLLOUT_STEPS - 2), *steps[1:][-1:]]
    shown: list[dict[str, Any]] = []
    size = 0
    for step in reversed(kept):
        groups = _by_task(read_samples(run_dir, step, "train"))
        if not groups:
            continue
        tasks = [_rollout_task(group) for group in list(groups.values())[:ROLLOUT_TASKS]]
        size += sum(_picture_bytes(task) for task in tasks)
        if shown and size > ROLLOUT_BYTES:
            break
        rewards = any(record.reward is not None for group in groups.values() for record in group)
        note = f"The first {len(tasks)} of the {len(groups)} tasks stored at step {step}, without selection."
        shown.append({"step": step, "note": note, "rewards": rewards, "tasks": tasks})
    return shown[::-1]


def _picture_bytes(task: dict[str, Any]) -> int:
    outputs = [picture for sample in task["samples"] for picture in sample["outputs"]]
    return sum(map(len, task["images"])) + sum(
        len(part) for each in outputs for part in (each["source"], each.get("still", ""))
    )


def before_after(runs: Sequence[tuple[str, Path]]) -> dict[str, Any] | None:
    """Samples of the same tasks at the start of each run and at the end of the last run."""
    columns = [
        (label, {task: group for task, group in groups.items() if not group[0].outputs})
        for label, groups in evaluation_columns(runs)
    ]
    if len(columns) < 2:
        return None
    last = columns[-1][1]
    kept = [(label, groups) for label, groups in columns if set(groups) & set(last)]
    shared = [task for task in last if sum(task in groups for _, groups in kept) > 1]
    if len(kept) < 2 or not shared:
        return None
    tasks = [
        {**_task_view(last[task][0]), "sides": [_side(groups.get(task)) for _, groups in kept]}
        for task in shared[:COMPARED_TASKS]
    ]
    note = f"The first {len(tasks)} of the {len(shared)} tasks stored in both evaluations, without selection."
    return {"note": note, "columns": [label for label, _ in kept], "tasks": tasks}


def evaluation_columns(
    runs: Sequence[tuple[str, Path]], during: int = 0
) -> list[tuple[str, dict[str, list[SampleRecord]]]]:
    """Saved samples of the first evaluation of each run, and of the last evaluation of the last run."""
    columns = []
    folders = [read_run(folder) for _, folder in runs]
    for index, (name, folder) in enumerate(runs):
        steps = sample_steps(folder, "eval")
        between = [] if index < len(runs) - 1 else _spread(steps[1:-1], during)
        end = [] if index < len(runs) - 1 else steps[1:][-1:]
        for step in [*steps[:1], *between, *end]:
            when = "before" if step == 0 else "during" if step in between else "after"
            label = f"{when} {name}" if len(runs) > 1 else f"{when} training"
            if folders[index].only_evaluated:
                label = "evaluated"
            same = repeated_end(folders[index - 1], folders[index]) if index and when == "before" else None
            shown = f"{label} (step {step})" if same is None else f"after {runs[index - 1][0]} (step {same['step']})"
            groups = _by_task(read_samples(folder, step, "eval"))
            if groups:
                columns.append((shown, groups))
    return columns


def question(prompt: str) -> str:
    """The last user turn of a chat prompt without special tokens, or the whole prompt if there is none."""
    turns = _USER_TURN.findall(prompt)
    return readable(_MARK.sub("", turns[-1]).strip() if turns else prompt)


def readable_answer(text: str) -> str:
    r"""`readable`, with whitespace that would show as emptiness written out.

    A model before training answers with long runs of blank lines and tabs. Those and whitespace at either end become
    marks such as \n×7; a single line break or space between words stays.
    """
    inside = text.strip()
    start = text[: len(text) - len(text.lstrip())]
    end = text[len(text.rstrip()) :] if inside else ""
    return readable(_spelt(start) + _EMPTINESS.sub(lambda run: _spelt(run[0]), inside) + _spelt(end))


def readable(text: str) -> str:
    """Text of a run as a page can show it: repeated marks counted, control characters replaced, cut at a limit."""
    text = _REPEATED_MARK.sub(lambda run: f"{run[1]}×{len(run[0]) // len(run[1])}", text)
    text = CONTROL.sub("\ufffd", text)
    hidden = len(text) - TEXT_LIMIT
    return text if hidden <= 0 else f"{text[:TEXT_LIMIT]}… ({hidden} more characters)"


def show_number(value: float | None, signed: bool = False) -> str:
    """Four significant digits, or three decimals with a sign; a dash for missing and non-finite values."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:+.3f}" if signed else f"{value:.4g}"


def shown_image(image: Image) -> dict[str, Any]:
    """A generated image or film as a data URI, with its size on the page and whether it is `pixelated`.

    Small images are stored as they are and scaled up with sharp pixels, large ones are reduced. A film comes with its
    middle frame as `still`, for readers who have asked for less motion.
    """
    frames = film_frames(image)
    side, most = max(image.size), FILM_SIDE if len(frames) > 1 else DRAWN_SIDE
    pixelated = side < PIXELATED_BELOW
    scale = max(2, PIXELATED_SIDE // side) if pixelated else min(1.0, most / side)
    width, height = (round(scale * length) for length in image.size)
    shown = {"width": width, "height": height, "pixelated": pixelated}
    if len(frames) == 1:
        return shown | {"source": _data_uri(image) if pixelated else _data_uri(image, DRAWN_SIDE, "JPEG")}
    return shown | {"source": _film_uri(frames, pixelated), "still": _data_uri(frames[len(frames) // 2], FILM_SIDE)}


def _spelt(whitespace: str) -> str:
    """Whitespace as escapes, repeated ones counted."""
    runs = [(character, len(list(run))) for character, run in itertools.groupby(whitespace)]
    marks = [("␣" if character == " " else repr(character)[1:-1], count) for character, count in runs]
    return "".join(f"{mark}×{count}" if count > 1 else mark for mark, count in marks)


def _by_task(records: Sequence[SampleRecord]) -> dict[str, list[SampleRecord]]:
    groups: dict[str, list[SampleRecord]] = {}
    for record in records:
        groups.setdefault(str(record.id), []).append(record)
    return groups


def _spread(steps: Sequence[int], count: int) -> list[int]:
    chosen = min(count, len(steps))
    return [steps[round(index * (len(steps) + 1) / (chosen + 1)) - 1] for index in range(1, chosen + 1)]


def _rollout_task(group: Sequence[SampleRecord]) -> dict[str, Any]:
    terms = list(dict.fromkeys(term for record in group for term in record.terms))
    drawn = any(record.outputs for record in group)
    samples = [
        {
            "response": readable_answer(record.response),
            "outputs": [shown_image(image) for image in record.outputs],
            "reward": show_number(record.reward),
            "terms": [show_number(record.terms.get(term)) for term in terms],
            "advantage": show_number(record.advantage, signed=True),
            "tone": _tone(record.advantage),
            "finish": record.finish or "–",
        }
        for record in group[:SAMPLES_PER_TASK]
    ]
    ends = drawn and any(record.finish not in (None, "image") for record in group)
    return {**_task_view(group[0]), "terms": terms, "samples": samples, "drawn": drawn, "show_finish": ends}


def _task_view(record: SampleRecord) -> dict[str, Any]:
    asked, prompt = question(record.prompt), readable(record.prompt)
    return {
        "id": readable(str(record.id)),
        "question": asked,
        # the prompt of an image, and the instruction of a robot, are the question
        "prompt": None if record.outputs or prompt == asked else prompt,
        "answer": None if record.answer in (None, "") else readable(str(record.answer)),
        "images": [_question_uri(image) for image in record.images],
    }


def _question_uri(image: Image) -> str:
    exact = _data_uri(image)
    return exact if len(exact) <= PNG_BYTES else _data_uri(image, form="JPEG")


def _side(group: Sequence[SampleRecord] | None) -> dict[str, Any] | None:
    if not group:
        return None
    record = group[0]
    remark = "" if record.reward is None else f"reward {show_number(record.reward)}"
    return {"correct": record.correct, "remark": remark, "response": readable_answer(record.response)}


def _tone(advantage: float | None) -> str:
    if advantage is None or not math.isfinite(advantage) or advantage == 0:
        return ""
    return "good" if advantage > 0 else "bad"


def _data_uri(image: Image, side: int = IMAGE_SIDE, form: str = "PNG") -> str:
    modes = ("RGB", "L") if form == "JPEG" else ("RGB", "RGBA", "L")
    small = image if image.mode in modes else image.convert("RGB")
    if max(small.size) > side:
        small = small.copy()
        small.thumbnail((side, side))
    buffer = io.BytesIO()
    small.save(buffer, format=form, optimize=True, **({"quality": 90} if form == "JPEG" else {}))
    return f"data:image/{form.lower()};base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _film_uri(frames: Sequence[Image], lossless: bool) -> str:
    """A film as an animated WebP of at most 16 frames, which takes as long as the whole one."""
    count = min(len(frames), FILM_FRAMES)
    kept = [frames[index * (len(frames) - 1) // (count - 1)].copy() for index in range(count)]
    for frame in kept:
        frame.thumbnail((FILM_SIDE, FILM_SIDE))
    buffer = io.BytesIO()
    duration = round(1000 * len(frames) / FILM_RATE / count)
    kept[0].save(
        buffer, format="WEBP", save_all=True, append_images=kept[1:], duration=duration, loop=0, lossless=lossless
    )
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def image_grid(runs: Sequence[tuple[str, Path]]) -> dict[str, Any] | None:
    """One row per prompt, one column per evaluation; each cell has the images of the same seeds."""
    columns = [(label, _drawn(groups)) for label, groups in evaluation_columns(runs, GRID_DURING)]
    last = columns[-1][1] if columns else {}
    columns = [(label, drawn) for label, drawn in columns if set(drawn) & set(last)]
    if not columns:
        return None
    rows = [
        {
            "id": readable(task),
            "prompt": question(last[task].prompt),
            "cells": [_cell(drawn.get(task)) for _, drawn in columns],
        }
        for task in list(last)[:GRID_PROMPTS]
    ]
    note = f"The first {len(rows)} of the {len(last)} prompts stored in the evaluations, without selection"
    if any(group.correct is not None for group in last.values()):  # images of what was done, not drawn by the model
        title, note = "The same tasks in images", f"{note}."
    else:
        title = "Images of the same prompts and seeds"
        note += "; a run uses the same seeds every time. The reward is the mean over the images shown."
    return {"title": title, "note": note, "columns": [label for label, _ in columns], "rows": rows}


def save_image_grid(runs: Sequence[tuple[str, Path]], path: Path) -> Path | None:
    """Write the images before and after as one PNG: a row a prompt, the images of each evaluation side by side."""
    from matplotlib.figure import Figure

    columns = [(label, _drawn(groups)) for label, groups in evaluation_columns(runs)]
    prompts = list(columns[-1][1])[:FILE_PROMPTS] if columns else []
    columns = [(label, drawn) for label, drawn in columns if set(drawn) & set(prompts)]
    if not columns:
        return None
    width, height = len(columns) * GRID_IMAGES + 1, len(prompts)
    figure = Figure(figsize=(FILE_IMAGE_INCHES * (width + 1.2), FILE_IMAGE_INCHES * height + 0.6), layout="constrained")
    sides: Any = figure.subfigures(1, len(columns) + 1, width_ratios=[2.2, *[GRID_IMAGES] * len(columns)])
    for side, (label, drawn) in zip(sides[1:], columns, strict=True):
        side.suptitle(_title(shown_text(label), [drawn[task] for task in prompts if task in drawn]), fontsize=9)
        for axes, task in zip(side.subplots(height, GRID_IMAGES, squeeze=False), prompts, strict=True):
            _show(axes, drawn.get(task))
    sides[0].suptitle(" ", fontsize=9)
    for axes, task in zip(sides[0].subplots(height, 1, squeeze=False)[:, 0], prompts, strict=True):
        axes.axis("off")
        axes.text(
            1, 0.5, shown_text(question(columns[-1][1][task].prompt)), ha="right", va="center", fontsize=8, wrap=True
        )
    save_png(figure, path)
    return path


def _title(label: str, records: Sequence[SampleRecord]) -> str:
    rewards = [record.reward for record in records if record.reward is not None]
    return f"{label}\nmean reward of shown images {show_number(sum(rewards) / len(rewards))}" if rewards else label


def _show(row: Sequence[Axes], record: SampleRecord | None) -> None:
    images = [] if record is None else record.outputs[: len(row)]
    for axes, image in itertools.zip_longest(row, images):
        axes.axis("off")
        if image is not None:
            axes.imshow(image)


def _drawn(groups: dict[str, list[SampleRecord]]) -> dict[str, SampleRecord]:
    return {task: group[0] for task, group in groups.items() if group[0].outputs}


def _cell(record: SampleRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    reward = None if record.reward is None else f"reward {show_number(record.reward)}"
    terms = [f"{term} {show_number(value)}" for term, value in record.terms.items()]
    return {
        "images": [shown_image(image) for image in record.outputs[:GRID_IMAGES]],
        "reward": reward,
        "terms": ", ".join(terms),
        "response": None if record.correct is None else readable_answer(record.response),
    }
