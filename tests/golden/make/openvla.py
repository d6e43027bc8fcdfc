"""OpenVLA's action tokens by its public code."""

from types import SimpleNamespace

import numpy as np

from tests.golden.make.peers import Clone, Made

COMMIT = "c8f03f48af692657d3060c19588038c7220e9af9"
VOCABULARY = 32000


def make(path: str) -> Made:
    clone = Clone(path, "openvla/openvla", COMMIT)
    actions = np.random.RandomState(0).uniform(-1.2, 1.2, 60).round(4)
    # the edges of the bins, the ends and what lies beyond them
    actions = np.concatenate([actions, [-1.0, 1.0, 0.0, -1.5, 1.5], np.linspace(-1, 1, 256)[[1, 77, 128, 254]]])
    vocabulary = SimpleNamespace(vocab_size=VOCABULARY, decode=lambda ids: ids)
    tokenizer = clone.function("prismatic/vla/action_tokenizer.py", "ActionTokenizer")(vocabulary)
    ids = np.array(tokenizer(actions))
    inputs = {"actions": actions.tolist(), "vocabulary": VOCABULARY}
    peer = {"program": clone.name, "calls": ["prismatic/vla/action_tokenizer.py:ActionTokenizer"], "relative": 1e-15}
    peer |= {"ids": ids, "decoded": tokenizer.decode_token_ids_to_actions(ids)}
    return "OpenVLA, arXiv 2406.09246", inputs, [peer], clone
