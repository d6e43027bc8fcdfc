"""Rollouts as a report shows them: grouped by task, images inlined, the same questions before and after.

Answers are text or, for models that draw, images, which `image_grid.py` lays out over evaluations.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.training.record.samples import SampleRecord, read_samples, sample_steps
from mmrl.training.report.folder import read_run

if TYPE_CHECKING:
    from PIL.Image import Image

ROLLOUT_TASKS = 6
SAMPLES_PER_TASK = 8
COMPARED_TASKS = 12
TEXT_LIMIT = 4000
IMAGE_SIDE = 448
DRAWN_SIDE = 256
PIXELATED_BELOW = 128
PIXELATED_SIDE = 96

_REPEATED_MARK = re.compile(r"(<\|[^<>|]+\|>)\1+")
_MARK = re.compile(r"<\|[^<>|]+\|>")
_USER_TURN = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
_EMPTINESS = re.compile(r"\n[^\S\n]*\n\s*|[^\S\n]{3,}|[^\S\n ]")
"""Blank lines, three spaces or more, and whitespace that is neither space nor line break."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def sample_gallery(run_dir: Path) -> dict[str, Any] | None:
    """Rollouts of the last training step that kept some, task by task."""
    steps = sample_steps(run_dir, "train")
    groups = _by_task(read_samples(run_dir, steps[-1], "train")) if steps else {}
    if not groups:
        return None
    shown = list(groups.values())[:ROLLOUT_TASKS]
    rewards = any(record.reward is not None for group in shown for record in group)
    note = f"The first {len(shown)} of the {len(groups)} tasks kept from step {steps[-1]}, not selected."
    return {"note": note, "rewards": rewards, "tasks": [_rollout_task(group) for group in shown]}


def before_after(runs: Sequence[tuple[str, Path]]) -> dict[str, Any] | None:
    """Answers to the same held-out questions at the start of each run and at the end of the last."""
    columns = [(label, _answered(groups)) for label, groups in evaluation_columns(runs)]
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
    note = f"The first {len(tasks)} of the {len(shared)} questions kept from both evaluations, not selected."
    return {"note": note, "columns": [label for label, _ in kept], "tasks": tasks}


def evaluation_columns(
    runs: Sequence[tuple[str, Path]], during: int = 0
) -> list[tuple[str, dict[str, list[SampleRecord]]]]:
    """Saved samples of the first evaluation of each run, and of the last evaluation of the last run."""
    columns = []
    for index, (name, folder) in enumerate(runs):
        steps = sample_steps(folder, "eval")
        between = [] if index < len(runs) - 1 else _spread(steps[1:-1], during)
        end = [] if index < len(runs) - 1 else steps[1:][-1:]
        for step in [*steps[:1], *between, *end]:
            when = "before" if step == 0 else "during" if step in between else "after"
            label = f"{when} {name}" if len(runs) > 1 else f"{when} training"
            if read_run(folder).only_evaluated:
                label = "evaluated"
            groups = _by_task(read_samples(folder, step, "eval"))
            if groups:
                columns.append((f"{label} (step {step})", groups))
    return columns


def question(prompt: str) -> str:
    """The last user turn of a chat prompt without its marks, or the whole prompt where there is none."""
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
    text = _CONTROL.sub("\ufffd", text)
    hidden = len(text) - TEXT_LIMIT
    return text if hidden <= 0 else f"{text[:TEXT_LIMIT]}… ({hidden} more characters)"


def show_number(value: float | None, signed: bool = False) -> str:
    """Four digits, or three decimals with a sign; a dash for what is missing or not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:+.3f}" if signed else f"{value:.4g}"


def picture(image: Image) -> dict[str, Any]:
    """An image that a model drew, as a data URI, with its size in pixels of the page and whether it is `pixelated`.

    Small images are stored as they are and scaled up with sharp pixels, large ones are reduced.
    """
    side = max(image.size)
    if side < PIXELATED_BELOW:
        factor = max(2, PIXELATED_SIDE // side)
        width, height = (factor * length for length in image.size)
        return {"source": _data_uri(image), "width": width, "height": height, "pixelated": True}
    reduction = max(1.0, side / DRAWN_SIDE)
    width, height = (round(length / reduction) for length in image.size)
    return {"source": _data_uri(image, DRAWN_SIDE, "JPEG"), "width": width, "height": height, "pixelated": False}


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


def _answered(groups: dict[str, list[SampleRecord]]) -> dict[str, list[SampleRecord]]:
    return {task: group for task, group in groups.items() if not group[0].outputs}


def _spread(steps: Sequence[int], count: int) -> list[int]:
    chosen = min(count, len(steps))
    return [steps[round(place * (len(steps) + 1) / (chosen + 1)) - 1] for place in range(1, chosen + 1)]


def _rollout_task(group: Sequence[SampleRecord]) -> dict[str, Any]:
    terms = list(dict.fromkeys(term for record in group for term in record.terms))
    drawn = any(record.outputs for record in group)
    samples = [
        {
            "response": readable_answer(record.response),
            "outputs": [picture(image) for image in record.outputs],
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
    return {
        "id": readable(str(record.id)),
        "question": question(record.prompt),
        "prompt": None if record.outputs else readable(record.prompt),  # a drawn image's prompt is its question
        "answer": None if record.answer in (None, "") else readable(str(record.answer)),
        "images": [_data_uri(image) for image in record.images],
    }


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
