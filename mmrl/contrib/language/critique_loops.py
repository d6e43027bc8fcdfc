"""Data that critics and their models generate for each other: AutoMathCritique's refinements, and SPC's game.

    build_refinements("sft.jsonl", questions={"path": "questions.jsonl"}, model="my-vlm")
    build_game("pairs.jsonl", questions={"path": "questions.jsonl"}, sneaky="my-sneaky", critic="my-vlm", role="critic")

`build_refinements` has a model answer, criticises the answers and revises them, and keeps for `recipe: sft` what turned
out well: critiques after which a wrong answer became right, these revisions, and right first answers with critiques
that approve of them. A round of training on its rows is one of the paper's critique in the loop.

`build_game` is one round of SPC's game: a sneaky model puts an error into each right answer, and a critic judges it and
the right answer. The rows are pairs for `recipe: preference` with `objective: spc`: for the critic a right verdict is
preferred to a wrong one, for the sneaky model an error that more critiques miss.

Differences: AutoMathCritique (arXiv 2411.16579) has critiques by larger models, step by step, and a filter by a second
model; here the filter is whether the revision is right. SPC (arXiv 2504.19162) has sneaky steps in the middle of
solutions, verified by completing them; here a whole answer is altered, and an error is valid where `check` calls the
altered answer wrong. Its rewards of +-1 become pairs with equal outcomes left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.contrib.language.critique_rl import read_verdict
from mmrl.errors import UserError
from mmrl.rewards.answers import final_part
from mmrl.rewards.budget import right_answers
from mmrl.vlm.critic.critiques import CRITIQUE_TEMPLATE, critique_renderer, critique_task, write_texts
from mmrl.vlm.critic.questions import ask_instead, load_source, without_marks, write_questions
from mmrl.vlm.critic.revision import REVISION_TEMPLATE, Revision, next_turn, revision_renderer
from mmrl.vlm.data.task import VlmTask, question_text
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from mmrl.vlm.model.model_config import FrozenModelConfig

SNEAKY_TEMPLATE = """\
#### Question
{{ question }}
#### Answer
{{ answer }}
#### Task
Rewrite the answer with one error that changes the result and is hard to notice. Write the altered answer alone."""
"""Question of the sneaky model."""
ROLES = ("critic", "sneaky")
Row = tuple[VlmTask, VlmTask, dict[str, Any]]


def build_refinements(
    path: str | Path,
    *,
    questions: Mapping[str, Any],
    model: str,
    critic: str | None = None,
    answers: int = 2,
    critiques: int = 2,
    temperature: float = 1.0,
    max_new_tokens: int = 256,
    check: str = "exact",
    options: Mapping[str, Any] | None = None,
    critique_template: str = CRITIQUE_TEMPLATE,
    revision_template: str = REVISION_TEMPLATE,
    seed: int = 0,
) -> Path:
    """Write answers, critiques and revisions that turned out correct, for `recipe: sft`.

    Args:
        path: JSONL file to write; columns prompt, images, completion, answer (the right one) and kind (answer,
            criticise or revise).
        questions: options of a data set with the right answers in the column `answer`.
        model: folder or hub id of the model that answers and revises.
        critic: of the critic; None is the same model.
        answers: sampled answers of each question.
        critiques: sampled critiques of each answer.
        temperature: of answers and critiques; the revision is one sample of it too.
        max_new_tokens: the longest of all of them.
        check: reward that gives 1 to a right answer.
        options: its options.
        critique_template: the critic's question.
        revision_template: the turn that asks for a revision.
        seed: of everything drawn.

    Raises:
        UserError: data or models cannot be used, or nothing turned out well.
    """
    tasks = load_source(questions, "questions").tasks
    asked, revised = critique_renderer(critique_template), revision_renderer(revision_template)
    policy = load_policy(FrozenModelConfig(path=model))
    judge = policy if critic is None else load_policy(FrozenModelConfig(path=critic))
    config = SamplerConfig(max_new_tokens=max_new_tokens, temperature=temperature)
    first = _flat(tasks, write_texts(policy, tasks, answers, config, seed, "answers"))
    right = _right([task for task, _ in first], [text for _, text in first], check, options)
    about = [critique_task(task, without_marks(text), asked) for task, text in first]
    written = [
        (*row, critique)
        for row, own in zip(
            zip(first, right, about, strict=True),
            write_texts(judge, about, critiques, config, seed, "critiques"),
            strict=True,
        )
        # equal critiques of an answer would be one row several times
        for critique in dict.fromkeys(own)
    ]
    rows: list[Row] = [
        (task, task, _cells(task, text, "answer")) for (task, text), ok in zip(first, right, strict=True) if ok
    ]
    # a critique is learnt only if its verdict agrees with the check
    approved = [row for row in written if row[1] and read_verdict(row[3])]
    rows += [(row[0][0], row[2], _cells(row[0][0], row[3], "criticise")) for row in approved]
    wrong = [row for row in written if not row[1] and read_verdict(row[3]) is False]
    turns = [next_turn(task, task, Revision([text], [critique]), revised) for (task, text), _, _, critique in wrong]
    second = [own[0] for own in write_texts(policy, turns, 1, config, seed, "revisions")] if turns else []
    fixed = _right([row[0][0] for row in wrong], second, check, options)
    for row, turn, text, ok in zip(wrong, turns, second, fixed, strict=True):
        if ok:
            task = row[0][0]
            # the critique too: it led to a right answer
            rows += [(task, row[2], _cells(task, row[3], "criticise")), (task, turn, _cells(task, text, "revise"))]
    if not rows:
        raise UserError(
            f"none of {len(first)} answers led to a correct result; sample more, or start from a better model"
        )
    return write_questions(path, rows)


def build_game(
    path: str | Path,
    *,
    questions: Mapping[str, Any],
    sneaky: str,
    critic: str,
    role: str,
    errors: int = 4,
    critiques: int = 4,
    temperature: float = 1.0,
    max_new_tokens: int = 256,
    check: str = "exact",
    options: Mapping[str, Any] | None = None,
    sneaky_template: str = SNEAKY_TEMPLATE,
    critique_template: str = CRITIQUE_TEMPLATE,
    seed: int = 0,
) -> Path:
    """Write the pairs from one round of SPC's game for one of the players.

    Args:
        path: JSONL file to write; columns prompt, images, chosen, rejected, score_chosen and score_rejected.
        questions: options of a data set with the right answers in the column `answer`.
        sneaky: folder or hub id of the model that puts errors in.
        critic: of the critic.
        role: player that the pairs are for, critic or sneaky.
        errors: altered answers that are sampled of each question.
        critiques: critiques that are sampled of each answer.
        temperature: of both.
        max_new_tokens: the longest of both.
        check: reward that gives 1 to a right answer; an alteration that it calls right is no error.
        options: its options.
        sneaky_template: the sneaky model's question, with {{ question }} and {{ answer }}.
        critique_template: the critic's question.
        seed: of everything drawn.

    Raises:
        UserError: the role is unknown, data or models cannot be used, or all outcomes are equal.
    """
    if role not in ROLES:
        raise UserError(f"role is {role!r}; allowed: {', '.join(ROLES)}")
    tasks = load_source(questions, "questions").tasks
    render, asked = critique_renderer(sneaky_template), critique_renderer(critique_template)
    config = SamplerConfig(max_new_tokens=max_new_tokens, temperature=temperature)
    right = [str(task.columns.get("answer", "")) for task in tasks]
    pairs = zip(tasks, right, strict=True)
    plots = [ask_instead(task, render(question=question_text(task), answer=text), "sneaky") for task, text in pairs]
    altered = write_texts(load_policy(FrozenModelConfig(path=sneaky)), plots, errors, config, seed, "sneaky")
    shown = [[(final_part(text) or "").strip() for text in own] for own in altered]
    flat = [(number, text) for number, own in enumerate(shown) for text in dict.fromkeys(own)]
    same = _right([tasks[number] for number, _ in flat], [text for _, text in flat], check, options)
    # an alteration that is still right is no error to be found
    judged = [*dict.fromkeys((number, text) for (number, text), ok in zip(flat, same, strict=True) if text and not ok)]
    # the critic also judges right answers, else it would learn to always object
    judged += list(enumerate(right)) if role == "critic" else []
    about = [critique_task(tasks[number], without_marks(text), asked) for number, text in judged]
    judge = load_policy(FrozenModelConfig(path=critic))
    written = write_texts(judge, about, critiques, config, seed, "critiques") if about else []
    caught = [
        # right where it approves of exactly the right answer
        [read_verdict(text) is (answer == right[number]) for text in own]
        for (number, answer), own in zip(judged, written, strict=True)
    ]
    rows: list[Row] = []
    if role == "critic":
        for (number, _), question, own, good in zip(judged, about, written, caught, strict=True):
            rows += _pairs(tasks[number], question, dict(zip(own, map(float, good), strict=True)))
    else:
        missed = {key: 1 - sum(good) / len(good) for key, good in zip(judged, caught, strict=True)}
        for number, own in enumerate(altered):
            # below all that were judged: an alteration that changed nothing, or was empty
            scores = {text: missed.get((number, said), -1.0) for text, said in zip(own, shown[number], strict=True)}
            rows += _pairs(tasks[number], plots[number], scores)
    if not rows:
        raise UserError(f"all {len(judged)} judged answers have the same outcome; sample more errors and critiques")
    return write_questions(path, rows)


def _pairs(task: VlmTask, question: VlmTask, scores: Mapping[str, float]) -> list[Row]:
    """A pair of the best and the worst text, where they differ in score and neither is empty."""
    usable = {text: score for text, score in scores.items() if text.strip()}
    # without two different scores there is no better one
    if len(set(usable.values())) < 2:
        return []
    chosen, rejected = max(usable, key=usable.__getitem__), min(usable, key=usable.__getitem__)
    columns = {"chosen": chosen, "rejected": rejected}
    return [(task, question, columns | {"score_chosen": usable[chosen], "score_rejected": usable[rejected]})]


def _flat(tasks: Sequence[VlmTask], texts: Sequence[Sequence[str]]) -> list[tuple[VlmTask, str]]:
    return [(task, text) for task, own in zip(tasks, texts, strict=True) for text in dict.fromkeys(own)]


def _right(tasks: Sequence[VlmTask], texts: Sequence[str], check: str, options: Mapping[str, Any] | None) -> list[bool]:
    """Whether texts are right answers to their questions."""
    if not tasks:
        return []
    gold, asked = [task.columns.get("answer") for task in tasks], [question_text(task) for task in tasks]
    found = right_answers("check", check, asked, list(texts), answer=gold, **(options or {}))
    return [value == 1 for value in found]


def _cells(task: VlmTask, completion: str, kind: str) -> dict[str, Any]:
    return {"completion": completion, "answer": task.columns.get("answer", ""), "kind": kind}
