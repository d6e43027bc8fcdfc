"""Action tokens against OpenVLA, and the temporal ensemble against ACT."""

from __future__ import annotations

import numpy as np

from robotics.episodes.collect import TemporalEnsemble
from robotics.policies.base.action_tokens import ActionTokenizer
from tests.golden.numbers import FLOAT32, assert_agrees, load


def test_openvla_tokens():
    file = load("openvla")
    (peer,) = file.peers
    tokenizer = ActionTokenizer()
    first_id = file.inputs["vocabulary"] - tokenizer.bins
    indices = tokenizer.encode(np.array(file.inputs["actions"]))
    assert (first_id + indices).tolist() == peer["ids"]
    found = tokenizer.decode(np.array(peer["ids"]) - first_id)
    assert found.tolist() == np.array(peer["decoded"], np.float32).tolist()


def test_act_ensemble():
    file = load("act")
    chunks = np.array(file.inputs["chunks"])
    steps, chunk, size = chunks.shape
    ensemble = TemporalEnsemble(1, chunk, size, decay=0.01)
    found = np.stack([ensemble.step(chunks[t : t + 1], [0])[0] for t in range(steps)])
    assert_agrees(found, file.peers[0], "actions", relative=FLOAT32)
