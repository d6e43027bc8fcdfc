"""LLaVA-Critic-R1's data: pairs of answers as verifiable questions (which of the two is better?), in both orders.

    build_questions("critic.jsonl", pairs={"path": "pairs.jsonl"})

Each pair becomes two questions, the preferred response first and second, so that a critic that always answers 1 earns
half. The answer, 1 or 2, belongs into a box; `format` (style boxed, weight 0.1) and `exact` (weight 0.9) are the
paper's rewards. Training is the ordinary `vlm` recipe.

The wording is this project's own: that of the released data set was not available.

Source: Wang et al., LLaVA-Critic-R1, arXiv 2509.00676; LLaVA-VL/LLaVA-NeXT llava-critic-r1/EasyR1 (rewards).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import UserError
from mmrl.hub.tables import LoadedRows
from mmrl.vlm.data.dataset import DataConfig, LoadedTasks, load_tasks, write_media_rows
from mmrl.vlm.data.messages import MARKS, make_template, split_marks
from mmrl.vlm.data.task import TaskError, VideoClip, VlmTask, last_user_turn, question_text, shortened
from mmrl.vlm.methods.pairs import PairColumns, keep_pairs, sides_of


def ask_instead(task: VlmTask, text: str, name: str) -> VlmTask:
    """The task with a different last user turn, and without the turns after it."""
    last = last_user_turn(task)
    items = split_marks(text)
    media = [item["type"] for item in items if item["type"] != "text"]
    wanted = [item["type"] for item in task.messages[last]["content"] if item["type"] != "text"]
    if media != wanted:
        message = (
            f"the new question has the markers {media or 'nothing'}, the original one {wanted or 'nothing'}: a text "
            "in the data contains <image> or <video> as ordinary words"
        )
        raise TaskError("placeholder_mismatch", task.id, message)
    messages = [*task.messages[:last], {"role": "user", "content": items}]
    return replace(task, id=f"{task.id}/{name}", messages=messages)


def without_marks(text: str) -> str:
    """A model's answer as part of a question: any <image> and <video> in it are plain words."""
    return MARKS.sub(lambda mark: mark[0][1:-1], text)


def check_no_marks(task: VlmTask, where: str, text: str) -> None:
    """Reject a text in the data that would be read as an image or video marker; raises TaskError."""
    if mark := MARKS.search(text):
        message = f"{where} contains {mark[0]}, which is the placeholder of a file: {shortened(text)!r}; remove it"
        raise TaskError("media_in_side", task.id, message)


def write_questions(path: str | Path, rows: Sequence[tuple[VlmTask, VlmTask, dict[str, Any]]]) -> Path:
    """Write rows of a .jsonl file: the task whose images and videos a question shows, the question, other columns."""
    media, left, written = Path(path).with_suffix("").name, iter(rows), dict[str, list[str]]()

    def save(folder: Path, stem: str) -> dict[str, Any]:
        source, asked, columns = next(left)
        if source.id not in written:  # an image that has no file yet is written once per task
            own = f"{len(written):05d}"
            written[source.id] = [_image_file(source, n, folder, media, own) for n in range(len(source.images))]
        prompt: Any = asked.messages if asked.conversational or len(asked.messages) > 1 else question_text(asked)
        videos = {"videos": [_video_cell(source, clip) for clip in source.videos]} if source.videos else {}
        return {"prompt": prompt, "images": written[source.id], **videos, **columns}

    return write_media_rows(Path(path), len(rows), save)


def _image_file(task: VlmTask, number: int, folder: Path, media: str, stem: str) -> str:
    image = task.images[number]
    if isinstance(image, str) and not image.startswith("data:"):
        return str(Path(image).resolve())
    try:
        task.load_images()[number].save(folder / f"{stem}-{number}.png", compress_level=1)
    except TaskError as error:
        raise UserError(str(error)) from None
    return f"{media}/{stem}-{number}.png"


def _video_cell(task: VlmTask, clip: str | VideoClip) -> dict[str, Any]:
    source, options = (clip, {}) if isinstance(clip, str) else (clip.source, clip.options)
    if not isinstance(source, str):
        raise UserError(f"{task.id}: a video given as a list of frames cannot be written to a row; use a video file")
    return {"path": str(Path(source).resolve()), **options}


def load_source(options: Mapping[str, Any], name: str) -> LoadedTasks:
    """Read the questions of a dataset; if it is missing and its options set a builder, it is built first."""
    known = {field.name for field in dataclasses.fields(DataConfig)} - {"video"}
    if unknown := sorted(set(options) - known):
        raise UserError(f"{name} has no option {', '.join(unknown)}; available: {', '.join(sorted(known))}")
    if "path" not in options:
        raise UserError(f"{name} has no path; set {name}: {{path: FILE.jsonl}}, like data in a configuration")
    return load_tasks(DataConfig(**options))


CRITIC_TEMPLATE = """\
You are shown a question and two responses to it. Decide which response is better.
Question: {{ question }}
Response 1: {{ first }}
Response 2: {{ second }}
Think first, between <think> and </think>. Then put the number of the better response, 1 or 2, into \\boxed{}."""
"""Question for a critic; the original question's images stay where they are."""
ORDERS = ("chosen_first", "rejected_first")


def critic_renderer(template: str, option: str = "template") -> Callable[..., str]:
    """Template of a critic question as a function (question, first, second) -> text; raises UserError."""
    return make_template(template, ("question", "first", "second"), option, "part of what is judged")


def critic_task(task: VlmTask, first: str, second: str, render: Callable[..., str], name: str) -> VlmTask:
    """Ask which of two responses to a question is better; `name` is appended to the question's id."""
    return ask_instead(task, render(question=question_text(task), first=first, second=second), name)


def build_questions(
    path: str | Path,
    *,
    pairs: Mapping[str, Any],
    template: str = CRITIC_TEMPLATE,
    chosen_key: str = "chosen",
    rejected_key: str = "rejected",
    random_answers: bool = False,
    seed: int = 0,
) -> Path:
    """Write the critic's questions for a dataset of pairs.

    Args:
        path: JSONL file to write; columns prompt, images, answer ("1" or "2"), pair (its id) and order.
        pairs: options of the data set as in `data` of a configuration: path, and perhaps build and build_options.
        template: text with {{ question }}, {{ first }} and {{ second }}, or a .jinja file.
        chosen_key: column of the preferred response: a text, or chat turns.
        rejected_key: column of the rejected response.
        random_answers: draw the answers at random: the control whose reward is independent of the responses.
        seed: of these draws.

    Returns:
        The file, with the two orders of a pair in a row.

    Raises:
        UserError: the pairs cannot be read or a pair is bad: its sides are equal, empty or missing, say. With
            `on_bad_row: skip` among the options of `pairs` such rows are counted, logged and left out.
    """
    render = critic_renderer(template)
    columns = PairColumns(chosen_key, rejected_key)
    loaded = keep_pairs(load_source(pairs, "pairs"), columns)
    usable = LoadedRows[tuple[VlmTask, list[VlmTask]]]([], loaded.on_bad_row, problems=loaded.problems)
    usable.take(loaded.tasks, lambda task: (task, _both_orders(task, columns, render)))
    usable.check_left("the pairs")
    asked = usable.tasks
    answers = ["1", "2"] * len(asked)
    if random_answers:
        answers = [str(number) for number in np.random.default_rng([seed, 20]).integers(1, 3, 2 * len(asked))]
    return write_questions(
        path,
        [
            (task, question, {"answer": answers[2 * number + order], "pair": task.id, "order": ORDERS[order]})
            for number, (task, questions) in enumerate(asked)
            for order, question in enumerate(questions)
        ],
    )


def _both_orders(task: VlmTask, columns: PairColumns, render: Callable[..., str]) -> list[VlmTask]:
    chosen, rejected = sides_of(task, columns)
    for name, side in ((columns.chosen, chosen), (columns.rejected, rejected)):
        check_no_marks(task, f"column '{name}'", side)
    return [
        critic_task(task, chosen, rejected, render, ORDERS[0]),
        critic_task(task, rejected, chosen, render, ORDERS[1]),
    ]
