"""Judges of whole episodes for the tests of `mmrl.agents.monitor`."""

import json

import numpy as np

BRIGHTNESS = "share_of_bright_columns"


def bright_columns(image):
    return int((np.asarray(image)[1, :, 0] == 250).sum())


def record(prompts, completions, images, goal, completion_lengths, environment_reward, success, path):
    with open(path, "w", encoding="utf-8") as file:
        for number, completion in enumerate(completions):
            row = {
                "prompt": prompts[number],
                "completion": completion,
                "bright_columns": [bright_columns(image) for image in images[number]],
                "goal": goal[number],
                "completion_lengths": completion_lengths[number],
                "environment_reward": environment_reward[number],
                "success": success[number],
            }
            file.write(json.dumps(row) + "\n")
    return [1.0] * len(completions)


def share_of_bright_columns(prompts, completions, images, **columns):
    """Share of bright columns in the last image."""
    return [bright_columns(own[-1]) / own[-1].width for own in images]


def words(prompts, completions, **columns):
    assert "images" not in columns
    return [float(sum(len(turn["content"]) for turn in turns)) for turns in completions]


def has_both(prompts, completions, success, data_success, data_completions, **columns):
    """Entries of tasks with the names of arguments come under others."""
    assert success == [True] * len(completions)
    return [float(row == ("wanted", ["a"])) for row in zip(data_success, data_completions, strict=True)]


def refuses_some(prompts, completions, trainer_state, **columns):
    return [None if row % 3 == 0 else 1.0 for row in range(len(completions))]


def fails(prompts, completions, **columns):
    raise RuntimeError("no judge")


def needs_map(prompts, completions, map):
    return [0.0] * len(completions)


def answers_four(prompts, completions, final_answer, **columns):
    return [float(answer == "4") for answer in final_answer]
