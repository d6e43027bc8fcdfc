r"""Toy data for both critics: handwritten digits that are read, judged, criticised and read again.

Critic-R1: scenes of one digit; pairs of a right and a wrong reading; a warm start on readings and judgements.
Critic-V: scenes of several digits; a warm start on readings, critiques of false readings and revisions.
Readings are <think>7</think>\boxed{7} in the first, 7 3 5 in the second. Judgements and critiques compare what they
read with what was said, digit by digit: <think>77= 73!</think>\boxed{1} prefers 7 to 3, and
<think>77= 38! 55=</think>number 2 finds the 8 of 7 8 5 wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmrl.vlm.critic.critiques import critique_renderer, insert_errors
from mmrl.vlm.critic.questions import critic_renderer
from mmrl.vlm.critic.revision import revision_renderer
from mmrl.vlm.data.dataset import write_rows
from mmrl.vlm.toy.digits import DigitScene, draw_scene, scan_pool

QUESTION = "Which digits are shown?"
CRITIC = "{{ question }} 1: {{ first }} 2: {{ second }}"
"""Short wording of the critic's question for models as small as these."""
CRITIQUE = "{{ question }} Answer: {{ answer }} Which numbers are wrong?"
"""Short wording of the question for a critique."""
SNEAKY = "{{ question }} Answer: {{ answer }} Wrong:"
"""Short wording of the question for an answer with an error."""
REVISION = "Wrong: {{ critique }}. {{ question }}"
"""Short wording of the turn that asks for a revision."""


def build_model(path: str | Path, **options: Any) -> Path:
    """Build a tiny random model with the words of these questions; `options` are those of `build_tiny`."""
    from mmrl.vlm.toy.tiny_generic import build_tiny

    digits = "0 1 2 3 4 5 6 7 8 9"
    texts = [
        f"{QUESTION} 1: {digits} 2: {digits}",
        f"{QUESTION} Answer: {digits} Which numbers are wrong?",
        f"Wrong: number 1; number 2; number 3. {QUESTION}",
        "<think>7 77= 73!</think>",
        "Wrong: none. none",
    ]
    return build_tiny(path, corpus=texts * 20, tokens=("\\boxed{",), **options)


def build_readings(
    path: str | Path,
    *,
    count: int = 1000,
    split: str = "train",
    digits: int = 1,
    boxed: bool = True,
    noise: float = 0.1,
    scans: int = 0,
    seed: int = 0,
) -> Path:
    """Write questions that ask for the digits of a scene.

    Args:
        path: JSONL file to write; columns problem, images, answer and completion.
        count: number of questions.
        split: "train" or "test", which choose disjoint scans.
        digits: of each scene.
        boxed: answers are boxed and without spaces, behind a think block; else they are the digits alone.
        noise: strength of background texture and pixel noise, as a fraction of full contrast.
        scans: use only the first so many scans of the split; 0 = all.
        seed: random seed.

    Returns:
        The file.
    """
    scenes = _scenes(split, seed, digits, noise, scans)

    def make_row() -> tuple[Image.Image, dict[str, Any]]:
        scene, read = next(scenes), _boxed_reading if boxed else _plain_reading
        return scene.image, {"problem": f"<image>{QUESTION}", **read(scene.digits)}

    return write_rows(Path(path), count, make_row)


def build_pairs(
    path: str | Path,
    *,
    count: int = 1000,
    split: str = "train",
    digits: int = 1,
    noise: float = 0.1,
    scans: int = 0,
    seed: int = 0,
) -> Path:
    """Write pairs of a correct reading and one with a wrong digit, in TRL's columns; arguments as for `build_readings`.

    Returns:
        The file; columns prompt, images, chosen and rejected.
    """
    scenes = _scenes(split, seed, digits, noise, scans)
    rng = np.random.default_rng([seed, 30])

    def make_row() -> tuple[Image.Image, dict[str, Any]]:
        scene = next(scenes)
        sides = {"chosen": _joined(scene.digits), "rejected": _joined(_misread(scene.digits, rng))}
        return scene.image, {"prompt": f"<image>{QUESTION}", **sides}

    return write_rows(Path(path), count, make_row)


def build_critic_start(
    path: str | Path,
    *,
    count: int = 1000,
    critic_share: float = 0.5,
    template: str = CRITIC,
    digits: int = 1,
    noise: float = 0.1,
    scans: int = 0,
    seed: int = 0,
) -> Path:
    """Write worked readings and worked judgements for a supervised warm start of Critic-R1.

    Args:
        path: JSONL file to write; columns problem, images, answer, completion and kind (read or judge).
        count: number of rows.
        critic_share: fraction of judgements.
        template: their wording.
        digits: of each scene.
        noise: strength of background texture and pixel noise, as a fraction of full contrast.
        scans: use only the first so many training scans; 0 = all.
        seed: random seed.
    """
    scenes, render = _scenes("train", seed, digits, noise, scans), critic_renderer(template)
    rng = np.random.default_rng([seed, 31])

    def make_row() -> tuple[Image.Image, dict[str, Any]]:
        scene = next(scenes)
        question, reading = f"<image>{QUESTION}", _boxed_reading(scene.digits)
        if rng.random() >= critic_share:
            return scene.image, {"problem": question, "kind": "read", **reading}
        sides = [_joined(scene.digits), _joined(_misread(scene.digits, rng))]
        better = int(rng.integers(1, 3))
        first, second = sides if better == 1 else sides[::-1]
        problem = render(question=question, first=first, second=second)
        thought = " ".join(_compared(scene.digits, side) for side in (first, second))
        completion = f"<think>{thought}</think>\\boxed{{{better}}}"
        return scene.image, {"problem": problem, "kind": "judge", "answer": str(better), "completion": completion}

    return write_rows(Path(path), count, make_row)


def build_critique_start(
    path: str | Path,
    *,
    count: int = 1000,
    shares: Sequence[float] = (0.4, 0.4, 0.2),
    critique_template: str = CRITIQUE,
    revision_template: str = REVISION,
    digits: int = 3,
    most: int = 2,
    noise: float = 0.1,
    scans: int = 0,
    seed: int = 0,
) -> Path:
    """Write readings, critiques of readings with errors, and revisions, for a supervised warm start of Critic-V.

    Args:
        path: JSONL file to write; columns prompt (chat turns), images, answer, completion and kind (read, criticise,
            revise or sneak: an error is put into a right reading).
        count: number of rows.
        shares: of the kinds; those that are left out have none.
        critique_template: wording of the question for a critique.
        revision_template: wording of the turn that asks for a revision.
        digits: of each scene.
        most: most wrong digits of a reading that is criticised or revised; some have none.
        noise: strength of background texture and pixel noise, as a fraction of full contrast.
        scans: use only the first so many training scans; 0 = all.
        seed: random seed.
    """
    scenes = _scenes("train", seed, digits, noise, scans)
    rng = np.random.default_rng([seed, 32])
    turns = _Turns(critique_renderer(critique_template), revision_renderer(revision_template), most)
    share = np.asarray([*shares, *[0.0] * (len(KINDS) - len(shares))], dtype=float) / sum(shares)

    def make_row() -> tuple[Image.Image, dict[str, Any]]:
        scene = next(scenes)
        kind = str(rng.choice(KINDS, p=share))
        prompt, target = turns.row(kind, scene.digits, rng)
        answer = target.rpartition("</think>")[2]
        return scene.image, {"prompt": prompt, "kind": kind, "answer": answer, "completion": target}

    return write_rows(Path(path), count, make_row)


KINDS = ("read", "criticise", "revise", "sneak")


@dataclass(frozen=True)
class _Turns:
    """Makes the chat turns of the kinds of rows."""

    criticise: Callable[..., str]
    revise: Callable[..., str]
    most: int

    def row(self, kind: str, digits: Sequence[int], rng: np.random.Generator) -> tuple[list[dict[str, Any]], str]:
        """Chat turns and the target."""
        right = _spaced(digits)
        altered = insert_errors(right, rng, least=0, most=self.most)
        critique = "; ".join(altered.errors) or "none"
        if kind == "criticise":
            thought = " ".join(map(_compared, map(str, digits), altered.text.split()))
            return [
                _user(self.criticise(question=QUESTION, answer=altered.text))
            ], f"<think>{thought}</think>{critique}"
        if kind == "sneak":
            asked = critique_renderer(SNEAKY)(question=QUESTION, answer=right)
            return [_user(asked)], insert_errors(right, rng, least=1, most=1).text
        if kind == "read":
            return [_user(QUESTION)], right
        turn = {"role": "user", "content": self.revise(critique=critique, question=QUESTION)}
        return [_user(QUESTION), {"role": "assistant", "content": altered.text}, turn], right


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": f"<image>{text}"}


def _scenes(split: str, seed: int, digits: int, noise: float, scans: int) -> Iterator[DigitScene]:
    rng = np.random.default_rng([seed, 33 if split == "test" else 34])
    pool = scan_pool(split, scans)
    while True:
        yield draw_scene(rng, pool, digits, noise)


def _boxed_reading(digits: Sequence[int]) -> dict[str, str]:
    answer = _joined(digits)
    return {"answer": answer, "completion": f"<think>{_spaced(digits)}</think>\\boxed{{{answer}}}"}


def _plain_reading(digits: Sequence[int]) -> dict[str, str]:
    return {"answer": _spaced(digits), "completion": _spaced(digits)}


def _misread(digits: Sequence[int], rng: np.random.Generator) -> list[int]:
    index = int(rng.integers(len(digits)))
    other = list(digits)
    other[index] = (digits[index] + int(rng.integers(1, 10))) % 10
    return other


def _compared(read: Sequence[object], said: str) -> str:
    """Each digit that was read, the one that was stated, and whether they are equal."""
    return "".join(f"{a}{b}{'=' if str(a) == b else '!'}" for a, b in zip(read, said, strict=True))


def _joined(digits: Sequence[int]) -> str:
    return "".join(map(str, digits))


def _spaced(digits: Sequence[int]) -> str:
    return " ".join(map(str, digits))
