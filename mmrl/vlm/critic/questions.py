"""LLaVA-Critic-R1's data: pairs of answers as verifiable questions, which of the two is better, in both orders.

    build_questions("critic.jsonl", pairs={"path": "pairs.jsonl"})

Each pair becomes two questions, the preferred response first and second, so that a critic that always answers 1 earns
half. The answer, 1 or 2, belongs into a box; `format` (style boxed, weight 0.1) and `exact` (weight 0.9) are the
paper's rewards. Training is the ordinary `vlm` recipe.

The wording is this project's own: that of the released data set was not available.

Source: Wang et al., LLaVA-Critic-R1, arXiv 2509.00676; LLaVA-VL/LLaVA-NeXT llava-critic-r1/EasyR1 (rewards).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.vlm.critic.asking import RowWriter, ask_instead, check_no_marks, question_text
from mmrl.vlm.critic.sources import load_source
from mmrl.vlm.image_rows import write_media_rows
from mmrl.vlm.pairs import PairColumns, keep_pairs, sides_of
from mmrl.vlm.prompts import make_template
from mmrl.vlm.task import TaskError, VlmTask

CRITIC_TEMPLATE = """\
You are shown a question and two responses to it. Decide which response is better.
Question: {{ question }}
Response 1: {{ first }}
Response 2: {{ second }}
Think first, between <think> and </think>. Then put the number of the better response, 1 or 2, into \\boxed{}."""
"""Question of a critic; the question's own images stay where they are."""
ORDERS = ("chosen_first", "rejected_first")


def critic_renderer(template: str, option: str = "template") -> Callable[..., str]:
    """Template of a critic question as a function (question, first, second) -> text; raises UserError."""
    return make_template(template, ("question", "first", "second"), option, "a part of what is judged")


def critic_task(task: VlmTask, first: str, second: str, render: Callable[..., str], name: str) -> VlmTask:
    """Ask which of two responses to a question is better; `name` goes behind the question's id."""
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
    """Write the critic's questions of a data set of pairs.

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
    asked: list[tuple[VlmTask, list[VlmTask]]] = []
    for task in loaded.tasks:
        try:
            asked.append((task, _both_orders(task, columns, render)))
        except TaskError as error:
            loaded.leave_out(error)
    loaded.tasks = [task for task, _ in asked]
    loaded.check_left("the pairs")
    answers = ["1", "2"] * len(asked)
    if random_answers:
        answers = [str(number) for number in np.random.default_rng([seed, 20]).integers(1, 3, 2 * len(asked))]
    writer, made = RowWriter(Path(path).with_suffix("").name), iter(range(2 * len(asked)))

    def save(folder: Path, stem: str) -> dict[str, Any]:
        number = next(made)
        task, questions = asked[number // 2]
        row = writer.row(task, questions[number % 2], folder)
        return {**row, "answer": answers[number], "pair": task.id, "order": ORDERS[number % 2]}

    return write_media_rows(Path(path), 2 * len(asked), save)


def _both_orders(task: VlmTask, columns: PairColumns, render: Callable[..., str]) -> list[VlmTask]:
    chosen, rejected = sides_of(task, columns)
    for name, side in ((columns.chosen, chosen), (columns.rejected, rejected)):
        check_no_marks(task, f"column '{name}'", side)
    return [
        critic_task(task, chosen, rejected, render, ORDERS[0]),
        critic_task(task, rejected, chosen, render, ORDERS[1]),
    ]
