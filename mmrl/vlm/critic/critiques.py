"""Critic-V's data: answers with false details, critiques of them, and pairs of a better and a worse critique for DPO.

    build_false_answers("false.jsonl", answers={"path": "answers.jsonl"})
    build_pairs("pairs.jsonl", questions={"path": "false.jsonl"}, model="my-vlm")

`build_false_answers` writes critic questions about answers with errors (`insert_errors`), with the errors in
the column `inserted`: held-out data for `f1_reward`, and what `build_pairs` starts from. That function has a model
write several critiques of each, or takes those of a column, and scores them. Every two with different scores that both
list something become a preferred and a rejected answer for `recipe: preference`. In the paper three models write a
critique each.

Source: Zhang et al., Critic-V, arXiv 2411.18203; kyrieLei/Critic-V data_utils/utils/format.py (pairs, prompt).

False details for right answers, the details that a critique lists, and how well the two agree; needs no model.

    altered = insert_errors("3 cats and 2 dogs", rng)           # "3 cats and 7 dogs", ["number 2"]
    critique_score("number 2", altered.errors)                  # 1.0
    critique_score("number 1; number 2", altered.errors)        # 0.5

Critic-V has GPT-4o put 1 to 5 false details into an answer and scores a critique by the Jaccard index of what it lists
and what was put in, plus a tenth of GPT's mark from 0 to 10, rounded to two decimals. Here both are rules: the built-in
details are an answer's numbers, and two details are the same where their texts are, apart from case, spaces and closing
punctuation. Other ways to put errors in and a judge are the user's own functions.

Source: Zhang et al., Critic-V, arXiv 2411.18203; kyrieLei/Critic-V data_utils/inject, data_utils/score_compute.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import UserError
from mmrl.rewards.answers import Chat, completion_text, final_part, normalise
from mmrl.rewards.reward_loading import load_function
from mmrl.training.processes import make_generator
from mmrl.vlm.critic.questions import ask_instead, check_no_marks, load_source, write_questions
from mmrl.vlm.data.messages import make_template
from mmrl.vlm.data.task import TaskError, VlmTask, question_text
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from mmrl.vlm.model.model_config import FrozenModelConfig

MOST_ERRORS = 5
"""Maximum number of false details in an answer, as in the paper."""
NUMBER = re.compile(r"\d+")
HEADING = re.compile(r"^\s*#+\s*critique\s*:?", re.IGNORECASE)
BULLET = re.compile(r"^\s*(?:[-*\u2022]|\d+[.)])\s+")
NOTHING = ("", "none", "nothing", "no errors", "no error", "no weaknesses", "correct")
"""Normalised critiques that find nothing wrong."""


@dataclass(frozen=True)
class Altered:
    """An answer with false details."""

    text: str
    errors: list[str]
    """The false details as a critique should list them."""


Insert = Callable[[str, int, np.random.Generator], Altered]
"""Inserts up to a given number of errors into a correct answer; raises ValueError if it cannot insert any."""


def alter_numbers(answer: str, count: int, rng: np.random.Generator) -> Altered:
    """Replace some numbers in an answer by others with the same number of digits; the k-th number is "number k"."""
    found = list(NUMBER.finditer(answer))
    if not found:
        raise ValueError(f"the answer {answer!r:.80} has no number; the built-in errors only replace numbers")
    indices = sorted(int(index) for index in rng.choice(len(found), min(count, len(found)), replace=False))
    text, end = "", 0
    for index in indices:
        text += answer[end : found[index].start()] + _other_number(found[index][0], rng)
        end = found[index].end()
    return Altered(text + answer[end:], [f"number {index + 1}" for index in indices])


def insert_errors(
    answer: str,
    rng: np.random.Generator,
    *,
    least: int = 1,
    most: int = MOST_ERRORS,
    insert: Insert = alter_numbers,
) -> Altered:
    """Insert false details into a correct answer.

    Args:
        answer: the right answer.
        rng: draws their number, evenly from least to most, and the details.
        least: fewest errors; 0 may leave the answer as it is.
        most: most errors.
        insert: puts them in.

    Raises:
        ValueError: the bounds are no bounds, the answer offers no detail, or nothing was changed.
    """
    if not 0 <= least <= most or most < 1:
        raise ValueError(f"least={least} and most={most} must satisfy 0 <= least <= most, with most at least 1")
    count = int(rng.integers(least, most + 1))
    if count == 0:
        return Altered(answer, [])
    altered = insert(answer, count, rng)
    if not altered.errors or altered.text == answer:
        raise ValueError(f"no error was inserted into {answer!r:.80}; a false answer must differ from the correct one")
    return altered


def listed_details(critique: str) -> list[str]:
    """Details that a critique criticises: its lines or semicolon-separated parts, without bullets."""
    body = HEADING.sub("", final_part(critique) or "")
    items = [normalise(BULLET.sub("", line)) for line in re.split(r"[;\n]", body)]
    return list(dict.fromkeys(item for item in items if item not in NOTHING))


def is_satisfied(critique: str) -> bool:
    """Whether a critique finds nothing wrong: it lists nothing, or has the word "correct" and not "incorrect".

    Source: kyrieLei/Critic-V inference/reason_critic.py (its stopping rule).
    """
    text = critique.lower()
    return not listed_details(critique) or ("correct" in text and "incorrect" not in text)


def jaccard(listed: Sequence[str], inserted: Sequence[str]) -> float:
    """Intersection over union of the two lists; 1 if both are empty."""
    found, wanted = set(map(normalise, listed)), set(map(normalise, inserted))
    return len(found & wanted) / len(found | wanted) if found or wanted else 1.0


def f1(listed: Sequence[str], inserted: Sequence[str]) -> float:
    """Harmonic mean of precision and recall, 2 |A and B| / (|A| + |B|); 1 if both are empty."""
    found, wanted = set(map(normalise, listed)), set(map(normalise, inserted))
    return 2 * len(found & wanted) / (len(found) + len(wanted)) if found or wanted else 1.0


def critique_score(critique: str, inserted: Sequence[str], mark: float = 0.0) -> float:
    """Score of a critique: Jaccard index plus a tenth of a judge's mark, rounded to two decimals.

    Args:
        critique: text.
        inserted: the false details of the answer.
        mark: of a judge, from 0 to 10; 0 without one.

    Raises:
        ValueError: the mark is out of range.
    """
    if not 0 <= mark <= 10:
        raise ValueError(f"the judge's mark is {mark}; it must be from 0 to 10")
    return round(jaccard(listed_details(critique), inserted) + 0.1 * mark, 2)


def jaccard_reward(
    completions: Sequence[Chat], inserted: Sequence[Sequence[str] | None] | None = None, **_: Any
) -> list[float | None]:
    """Reward a critique by the Jaccard index of its listed details and the false details in column `inserted`.

    Rows without that column are questions of another kind and are not scored.
    """
    return _score_all(jaccard, completions, inserted)


def f1_reward(
    completions: Sequence[Chat], inserted: Sequence[Sequence[str] | None] | None = None, **_: Any
) -> list[float | None]:
    """Reward a critique by the F1 of the false details that it lists; otherwise as `jaccard_reward`."""
    return _score_all(f1, completions, inserted)


def _score_all(
    measure: Callable[[Sequence[str], Sequence[str]], float],
    critiques: Sequence[Chat],
    inserted: Sequence[Sequence[str] | None] | None,
) -> list[float | None]:
    wanted = [None] * len(critiques) if inserted is None else inserted
    if bad := next((errors for errors in wanted if not isinstance(errors, list | tuple | None)), None):
        raise ValueError(f"column 'inserted' is {bad!r:.80}; expected the list of an answer's false details")
    pairs = zip(critiques, wanted, strict=True)
    return [
        None if errors is None else measure(listed_details(completion_text(text)), errors) for text, errors in pairs
    ]


def _other_number(number: str, rng: np.random.Generator) -> str:
    """Another number with as many digits; the first digit of a long one is not 0."""
    low, high = (0, 10) if len(number) == 1 else (10 ** (len(number) - 1), 10 ** len(number))
    if len(number) > 18:  # more than an int64 holds: its last digit
        return number[:-1] + _other_number(number[-1], rng)
    drawn = int(rng.integers(low, high - 1))
    return str(drawn + (drawn >= int(number)))


CRITIQUE_TEMPLATE = """\
#### Question
{{ question }}
#### Answer
{{ answer }}
#### Task
Please provide a critique of the answer above. What are the weaknesses of the answer?"""
"""Question of the critic, in the sections of the public code."""
BATCH = 64
"""Number of answers to criticise together."""


def critique_renderer(template: str, option: str = "template") -> Callable[..., str]:
    """Template of a critic question as a function (question, answer) -> text; raises UserError."""
    return make_template(template, ("question", "answer"), option, "part of what is judged")


def critique_task(task: VlmTask, answer: str, render: Callable[..., str]) -> VlmTask:
    """Ask for the errors of an answer, about the same images; raises TaskError."""
    return ask_instead(task, render(question=question_text(task), answer=answer), "critique")


def build_false_answers(
    path: str | Path,
    *,
    answers: Mapping[str, Any],
    right_key: str = "answer",
    least: int = 1,
    most: int = MOST_ERRORS,
    insert: str | None = None,
    template: str = CRITIQUE_TEMPLATE,
    seed: int = 0,
) -> Path:
    """Write critic questions about answers with false details.

    Args:
        path: JSONL file to write; columns prompt, images, false_answer, inserted, and answer: the list as a critique.
        answers: options of a data set of questions with right answers, as in `data` of a configuration.
        right_key: column of the right answers.
        least: fewest errors of an answer; 0 leaves some answers right.
        most: most errors.
        insert: `module:function` as `mmrl.vlm.critic.critiques.Insert`; None replaces numbers.
        template: text with {{ question }} and {{ answer }}, or a .jinja file.
        seed: random seed.

    Returns:
        The file.

    Raises:
        UserError: the answers cannot be read, or one is missing or offers no detail that could be made false.
    """
    render = critique_renderer(template)
    put_in: Any = alter_numbers if insert is None else load_function(insert, what="insert")
    rng = np.random.default_rng([seed, 21])
    loaded = load_source(answers, "answers")
    rows: list[tuple[VlmTask, VlmTask, dict[str, Any]]] = []
    for task in loaded.tasks:
        try:
            altered = insert_errors(_right_answer(task, right_key), rng, least=least, most=most, insert=put_in)
            critique = "; ".join(altered.errors) or "none"
            columns = {"false_answer": altered.text, "inserted": altered.errors, "answer": critique}
            rows.append((task, critique_task(task, altered.text, render), columns))
        except ValueError as error:
            loaded.leave_out(TaskError("no_details", task.id, str(error)))
        except TaskError as error:
            loaded.leave_out(error)
    loaded.tasks = [task for task, _, _ in rows]
    loaded.check_left("the answers")
    return write_questions(path, rows)


def ordered_pairs(
    critiques: Sequence[str], scores: Sequence[float], *, allow_empty: bool = False
) -> list[tuple[int, int]]:
    """Every (preferred, rejected) with a higher and a lower score whose critiques both list something.

    Source: kyrieLei/Critic-V data_utils/utils/format.py (`dpo_format`).
    """
    usable = [index for index, text in enumerate(critiques) if text.strip() and (allow_empty or listed_details(text))]
    return [(a, b) for a, b in itertools.permutations(usable, 2) if scores[a] > scores[b]]


def build_pairs(
    path: str | Path,
    *,
    questions: Mapping[str, Any],
    model: str | None = None,
    critiques: int = 4,
    temperature: float = 1.0,
    max_new_tokens: int = 256,
    critiques_key: str | None = None,
    judge: str | None = None,
    pairs_per_answer: int = 0,
    allow_empty: bool = False,
    shuffle_scores: bool = False,
    seed: int = 0,
) -> Path:
    """Write pairs of a better and a worse critique of the same answer, for `recipe: preference`.

    Args:
        path: JSONL file to write; columns prompt, images, chosen, rejected, score_chosen, score_rejected.
        questions: options of a data set such as `build_false_answers` writes.
        model: folder or hub id of the model that writes critiques.
        critiques: how many it writes of each answer.
        temperature: of these.
        max_new_tokens: the longest critique.
        critiques_key: column with a list of critiques, instead of a model.
        judge: `module:function` (questions, false_answers, inserted, critiques) -> marks from 0 to 10, one a critique,
            of which a tenth is added to the Jaccard index; None adds nothing.
        pairs_per_answer: most pairs of one answer, drawn; 0 = all.
        allow_empty: also pairs with a critique that finds nothing wrong, so that answers without errors count.
        shuffle_scores: shuffle the scores of each answer's different critiques: the control without a signal.
        seed: random seed.

    Returns:
        The file.

    Raises:
        UserError: data, model or judge cannot be used, or no pair is left.
    """
    if (model is None) == (critiques_key is None):
        raise UserError("set either model, which writes the critiques, or critiques_key, the column that contains them")
    loaded = load_source(questions, "questions")
    for task in loaded.tasks:
        if not isinstance(task.columns.get("inserted"), list):
            found = ", ".join(task.columns) or "none"
            raise UserError(
                f"{task.id} has no list in column 'inserted', the false details; its other columns: {found}"
            )
    if model is None:
        written = [_given_critiques(task, str(critiques_key)) for task in loaded.tasks]
    else:
        written = _write_critiques(model, loaded.tasks, critiques, temperature, max_new_tokens, seed)
    rng = np.random.default_rng([seed, 22])
    rows: list[tuple[VlmTask, VlmTask, dict[str, Any]]] = []
    for task, texts, scores in zip(loaded.tasks, written, _scores(loaded.tasks, written, judge), strict=True):
        different = dict(zip(texts, scores, strict=True))
        ranked = _shuffled(different, rng) if shuffle_scores else different
        pairs = ordered_pairs(list(ranked), list(ranked.values()), allow_empty=allow_empty)
        if 0 < pairs_per_answer < len(pairs):
            pairs = [pairs[index] for index in sorted(rng.choice(len(pairs), pairs_per_answer, replace=False))]
        sides = list(ranked.items())
        for better, worse in pairs:
            (chosen, high), (rejected, low) = sides[better], sides[worse]
            columns = {"chosen": chosen, "rejected": rejected, "score_chosen": high, "score_rejected": low}
            rows.append((task, task, columns))
    if not rows:
        raise UserError(
            f"none of {len(written)} answers gives a pair: a pair needs two critiques that list something and have "
            "different scores; write more critiques, raise the temperature, or set allow_empty"
        )
    return write_questions(path, rows)


def _shuffled(scores: Mapping[str, float], rng: np.random.Generator) -> dict[str, float]:
    values = list(scores.values())
    return {text: values[index] for text, index in zip(scores, rng.permutation(len(values)), strict=True)}


def _right_answer(task: VlmTask, key: str) -> str:
    right = task.columns.get(key)
    if not isinstance(right, str) or not right.strip():
        message = f"column '{key}' is {right!r:.60}; expected the correct answer as text"
        raise TaskError("missing_answer", task.id, message)
    check_no_marks(task, f"column '{key}'", right)
    return right


def _given_critiques(task: VlmTask, key: str) -> list[str]:
    cell = task.columns.get(key)
    if not isinstance(cell, list) or not all(isinstance(text, str) for text in cell):
        raise UserError(f"{task.id}: column '{key}' is {cell!r:.80}; expected a list of critiques, each of them text")
    return cell


def _write_critiques(
    model: str, tasks: Sequence[VlmTask], count: int, temperature: float, max_new_tokens: int, seed: int
) -> list[list[str]]:
    """Sample `count` critiques of each answer."""
    from mmrl.vlm.engine.vlm_policy import load_policy

    config = SamplerConfig(max_new_tokens=max_new_tokens, temperature=temperature)
    return write_texts(load_policy(FrozenModelConfig(path=model)), tasks, count, config, seed, "critiques")


def write_texts(
    policy: Any, tasks: Sequence[VlmTask], count: int, config: SamplerConfig, seed: int, purpose: str
) -> list[list[str]]:
    """Sample `count` responses of a policy to each question; raises UserError if one cannot be encoded."""
    from mmrl.vlm.engine.vlm_sampler import sample

    found: list[list[str]] = []
    for start in range(0, len(tasks), BATCH):
        try:
            prompts = [policy.encode(task) for task in tasks[start : start + BATCH]]
        except TaskError as error:
            raise UserError(str(error)) from None
        texts = sample(policy, prompts, count, config, make_generator(seed, purpose, start)).texts
        found += [texts[index * count : (index + 1) * count] for index in range(len(prompts))]
    return found


def _scores(tasks: Sequence[VlmTask], written: Sequence[Sequence[str]], judge: str | None) -> list[list[float]]:
    marks = [[0.0] * len(texts) for texts in written] if judge is None else _marks(tasks, written, judge)
    return [
        [critique_score(text, task.columns["inserted"], mark) for text, mark in zip(texts, own, strict=True)]
        for task, texts, own in zip(tasks, written, marks, strict=True)
    ]


def _marks(tasks: Sequence[VlmTask], written: Sequence[Sequence[str]], judge: str) -> list[list[float]]:
    flat = [(task, text) for task, texts in zip(tasks, written, strict=True) for text in texts]
    found = load_function(judge, what="judge")(
        [question_text(task) for task, _ in flat],
        [task.columns.get("false_answer") for task, _ in flat],
        [task.columns["inserted"] for task, _ in flat],
        [text for _, text in flat],
    )
    marks = [float(mark) for mark in found]
    if len(marks) != len(flat) or not all(0 <= mark <= 10 for mark in marks):
        raise UserError(
            f"judge {judge!r} returned {len(marks)} marks for {len(flat)} critiques; expected one per critique, from "
            "0 to 10"
        )
    left = iter(marks)
    return [[next(left) for _ in texts] for texts in written]
