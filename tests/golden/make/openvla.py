"""OpenVLA's action tokens by its public code.

python -m tests.golden.make.openvla openvla
"""

import sys
from types import SimpleNamespace

import numpy as np

from tests.golden.make.peers import Clone, write

COMMIT = "c8f03f48af692657d3060c19588038c7220e9af9"
VOCABULARY = 32000


def main() -> None:
    clone = Clone(sys.argv[1], "openvla/openvla", COMMIT)
    actions = np.random.RandomState(0).uniform(-1.2, 1.2, 60).round(4)
    # the edges of the bins, the ends and what lies beyond them
    actions = np.concatenate([actions, [-1.0, 1.0, 0.0, -1.5, 1.5], np.linspace(-1, 1, 256)[[1, 77, 128, 254]]])
    vocabulary = SimpleNamespace(vocab_size=VOCABULARY, decode=lambda ids: ids)
    tokenizer = clone.function("prismatic/vla/action_tokenizer.py", "ActionTokenizer")(vocabulary)
    ids = np.array(tokenizer(actions))
    inputs = {"actions": actions.tolist(), "vocabulary": VOCABULARY}
    peer = {"program": clone.name, "calls": ["prismatic/vla/action_tokenizer.py:ActionTokenizer"], "relative": 1e-15}
    peer |= {"ids": ids, "decoded": tokenizer.decode_token_ids_to_actions(ids)}
    write("openvla", "OpenVLA, arXiv 2406.09246", inputs, [peer], clone)


if __name__ == "__main__":
    main()
