"""Pairs of REFUEL's setting one by its public code: draws of turns, filter, trained tokens and rewards of dialogues."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.golden.make.peers import Clone, Made
from tests.golden.make.refuel import COMMIT

DRAW, PAIR = "setting_one/generate.py", "setting_one/tokenize_mask.py"
TURNS, DRAWS = 5, 400_000
FIRST, SECOND = "trajectory", "trajectory_sampled_h_from_sampled_len"
CASES = (
    # the last turn that counts, h, and the answers of both dialogues; those before h are the same
    (4, 2, ["ab", "c", "dea", "b", "ce"], ["ab", "c", "b", "ea", "d"]),
    (3, 0, ["a", "bb", "ccc", "d", "e"], ["bcd", "a", "d", "ee", "b"]),
    (4, 4, ["a", "b", "c", "d", "eeee"], ["a", "b", "c", "d", "ab"]),
    (2, 1, ["c", "da", "b", "a", "e"], ["c", "da", "a", "e", "b"]),
)
REWARDS = (
    ([0.5, 0.25, 1.0, -0.5, 2.0], [0.5, 0.25, 0.75, 0.0, 1.5]),
    ([0.0, 1.0, 0.5, 0.25, 9.0], [1.0, -1.0, 2.0, 0.75, -9.0]),
    ([0.0, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0, 1.0]),
    ([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 0.0, 1.0, 2.0]),
)
"""Of the dialogue up to each turn."""


class Letters:
    """A chat template of single letters: a mark of the role, the letters, and 0 at the end of an answer."""

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = False, **_: Any) -> list[int]:
        ids: list[int] = []
        for message in messages:
            letters = [10 + ord(letter) - ord("a") for letter in message["content"]]
            ids += [1, *letters] if message["role"] == "user" else [2, *letters, 0]
        return [*ids, 2] if add_generation_prompt else ids


def dialogue(answers: list[str]) -> list[dict[str, str]]:
    """Answers of a dialogue, each after a question."""
    pairs = ((f"{'xyzvw'[turn]}", answer) for turn, answer in enumerate(answers))
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def make(path: str) -> Made:
    clone = Clone(path, "ZhaolinGao/REFUEL", COMMIT)
    np.random.seed(0)
    found = clone.lines(DRAW, 142, 143, args=SimpleNamespace(num_turns=TURNS), generated=range(DRAWS))
    draws = np.zeros((TURNS, TURNS))
    np.add.at(draws, (found.sampled_len, found.sampled_h), 1 / DRAWS)
    rows: list[dict[str, Any]] = [
        {
            FIRST: dialogue(one),
            SECOND: dialogue(other),
            "sampled_len_from_5": last,
            "sampled_h_from_sampled_len": h,
            f"{FIRST}_reward": rewards[0],
            f"{SECOND}_reward": rewards[1],
        }
        for (last, h, one, other), rewards in zip(CASES, REWARDS, strict=True)
    ]
    same = {"tqdm": lambda rows, **_: rows}
    kept = clone.function(PAIR, "filter_same_response", **same)(
        rows, FIRST, SECOND, "sampled_h_from_sampled_len", np.ones(len(rows))
    )
    masks = clone.function(PAIR, "generate_token_mask", **same)
    for column in (FIRST, SECOND):
        table = masks({column: [row[column] for row in rows]}, Letters(), column, list(range(TURNS)), 64)
        for name, values in table.items():
            for row, value in zip(rows, values, strict=True):
                row[name] = value
    pairs = clone.lines(PAIR, 142, 176, dataset_multi=rows, **same).data_dict

    def trained(side: str) -> list[list[int]]:
        """Tokens under the mask."""
        columns = zip(pairs[f"{side}_token"], pairs[f"{side}_mask"], strict=True)
        return [[token for token, on in zip(ids, mask, strict=False) if on] for ids, mask in columns]

    peer = {
        "program": clone.name,
        "calls": [f"{DRAW}:142-143", f"{PAIR}:filter_same_response", f"{PAIR}:generate_token_mask", f"{PAIR}:142-176"],
        "relative": 1e-12,
        "draws": draws,
        "kept": kept,
        "chosen": trained("chosen"),
        "reject": trained("reject"),
        "chosen_reward": pairs["chosen_reward"],
        "reject_reward": pairs["reject_reward"],
    }
    inputs = {"last": [case[0] for case in CASES], "h": [case[1] for case in CASES]}
    inputs |= {"answers": [list(case[2:]) for case in CASES], "rewards": [list(pair) for pair in REWARDS]}
    return "REFUEL, arXiv 2410.04612, setting one", inputs, [peer], clone
