"""First configurations of users' own runs, for `mmrl init`: a few commented lines with their model and data."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import NamedTuple

from mmrl.config import escaped
from mmrl.errors import UserError
from mmrl.files import write_atomically


class Starter(NamedTuple):
    """A configuration in outline, and what stands in it where the user gives nothing."""

    model: str
    data: str
    text: str

    def filled(self, model: str | None, data: str | None, folder: str) -> str:
        """The text with a user's values, each as a YAML text in quotes; values are not interpolated."""
        given = {"model": model or self.model, "data": data or self.data, "folder": folder}
        quoted = {name: json.dumps(escaped(value), ensure_ascii=False) for name, value in given.items()}
        grid = "{size: 4, walls: 2, max_steps: 10, text: true}" if given["data"] == GRID else "{}"
        return string.Template(self.text).substitute(quoted, kwargs=grid)


def write_starter(name: str, file: Path, model: str | None, data: str | None, *, force: bool) -> None:
    """Write the configuration of a starter; an existing file stays unless `force` is set."""
    if file.exists() and not force:
        raise UserError(f"{file} exists; --force overwrites it")
    write_atomically(file, STARTERS[name].filled(model, data, f"runs/{file.stem}"))


GRID = "mmrl.agents.toy.grid:GridWorld"
PAPO = Starter(
    "Qwen/Qwen2.5-VL-3B-Instruct",
    "data/train.jsonl",
    """\
# PAPO: GRPO on questions about images, with a loss for answers that do not depend on the image.
# `mmrl options papo` lists what else can be set.
recipe: papo
output_dir: $folder
model:
  path: $model  # folder or hub id
  dtype: bfloat16  # float32 on a CPU
  gradient_checkpointing: true
  max_prompt_tokens: 2048
  lora: {enabled: true, rank: 64, alpha: 128}
data:
  # .jsonl, .parquet or hub id, with the columns prompt (or problem, question), answer, and image or images
  # (paths relative to the file); data.prompt_key, answer_key and image_key give other names.
  path: $data
  format_prompt: "{{ content }} Think step by step, then give the final answer inside \\\\boxed{}."
# eval_data: {heldout: {path: data/test.jsonl}}  # measured before, during and after training
rewards:  # `mmrl list rewards`; your own: {name: mine, function: "my_rewards.py:score"}
  - {name: math}  # for numbers and formulas; exact for words, choice for letters of options
accuracy_reward: math
sampler: {max_new_tokens: 1024}
trainer:
  steps: 200
  tasks_per_step: 16
  samples_per_task: 8  # answers to each question
  micro_batch: 4  # answers that fit into memory at once
  learning_rate: 1e-5
""",
)
TEXT = Starter(
    "Qwen/Qwen3-4B-Instruct-2507",
    "data/train.jsonl",
    """\
# GRPO on a language model and questions with known answers. `mmrl options vlm` lists what else can be set.
recipe: vlm
output_dir: $folder
model:
  path: $model  # folder or hub id
  dtype: bfloat16  # float32 on a CPU
  gradient_checkpointing: true
  max_prompt_tokens: 512
  lora: {enabled: true, rank: 64, alpha: 32}
data:
  # .jsonl, .parquet or hub id, with the columns prompt (or problem, question) and answer; data.prompt_key and
  # data.answer_key give other names.
  path: $data
  format_prompt: "{{ content }} Think step by step, then give the final answer inside \\\\boxed{}."
# eval_data: {heldout: {path: data/test.jsonl}}  # measured before, during and after training
rewards:  # `mmrl list rewards`; your own: {name: mine, function: "my_rewards.py:score"}
  - {name: math}  # for numbers and formulas; exact for words, choice for letters of options
objective: {preset: grpo}  # others: `mmrl list objectives`
sampler: {max_new_tokens: 1024}
trainer:
  steps: 200
  tasks_per_step: 16
  samples_per_task: 8  # answers to each question
  micro_batch: 8  # answers that fit into memory at once
  learning_rate: 1e-5
""",
)
STARTERS = {
    "papo": PAPO,
    "grpo": PAPO._replace(
        text=PAPO.text.replace(
            "# PAPO: GRPO on questions about images, with a loss for answers that do not depend on the image.\n"
            "# `mmrl options papo` lists",
            "# GRPO on questions about images. `mmrl options vlm` lists",
        )
        .replace("recipe: papo", "recipe: vlm")
        .replace("sampler:", "objective: {preset: grpo}  # others: `mmrl list objectives`\nsampler:")
    ),
    "text": TEXT,
    "sft": Starter(
        TEXT.model,
        "data/train.jsonl",
        """\
# Supervised fine-tuning on answers that somebody wrote. `mmrl options sft` lists what else can be set.
recipe: sft
output_dir: $folder
model:
  path: $model  # folder or hub id; a vision-language model where rows have images
  dtype: bfloat16  # float32 on a CPU
  gradient_checkpointing: true
  lora: {enabled: true, rank: 64, alpha: 32}
data:
  path: $data  # .jsonl, .parquet or hub id, with the columns prompt (or problem, question), answer and target_key's
target_key: completion  # column of the text to learn; answer = the right answer itself
# eval_data: {heldout: {path: data/test.jsonl}}  # measured before, during and after training
evaluation:
  rewards: [{name: math}]  # says which answers to eval_data are right: `mmrl list rewards`
  sampler: {max_new_tokens: 1024}
trainer: {steps: 500, tasks_per_step: 32, micro_batch: 4, learning_rate: 1e-4, schedule: cosine, warmup_steps: 20}
""",
    ),
    "screens": Starter(
        "Qwen/Qwen2.5-VL-3B-Instruct",
        "data/train.jsonl",
        """\
# AEPO: a model learns to point at the element of a screen that is asked for. `mmrl options aepo` lists what else can
# be set, `mmrl gui validate` checks the data.
recipe: aepo
output_dir: $folder
model:
  path: $model  # folder or hub id
  dtype: bfloat16  # float32 on a CPU
  gradient_checkpointing: true
  max_pixels: 2000000  # larger screens are made smaller
  max_prompt_tokens: 4096
  lora: {enabled: true, rank: 64, alpha: 128}
grounding: {family: qwen2_5_vl}  # how prompts are put and points are read: `mmrl options aepo grounding`
data: {path: $data}  # .jsonl or .parquet with the columns image, instruction and bbox in pixels of the image
# eval_data: {heldout: {path: data/test.jsonl}}  # measured before, during and after training
sampler: {max_new_tokens: 128}
evaluation: {samples: 0}
trainer: {steps: 150, tasks_per_step: 16, samples_per_task: 8, micro_batch: 1, learning_rate: 1e-5}
""",
    ),
    "video": Starter(
        "Qwen/Qwen2.5-VL-3B-Instruct",
        "data/questions.jsonl",
        """\
# TSPO: a small agent learns which frames of a long video a frozen model has to see to answer a question.
# `mmrl options tspo` lists what else can be set, docs/videos.md the columns of the data.
recipe: tspo
output_dir: $folder
features:  # frames are embedded once, then read from the cache
  {path: openai/clip-vit-large-patch14, fps: 1, max_frames: 3600, cache: features, device: cuda}
data: {path: $data}  # rows with the columns video (path relative to the file), problem and answer
# eval_data: {heldout: {path: data/test.jsonl}}  # measured before, during and after training
picks: {count: 16}  # frames that the model is given
answerer:
  kind: vlm
  model: {path: $model, dtype: bfloat16}  # folder or hub id; is not trained
  reward: {name: choice}  # for letters of options; others: `mmrl list rewards`
trainer: {steps: 200, tasks_per_step: 16, samples_per_task: 8}
""",
    ),
    "awm": Starter(
        "stabilityai/stable-diffusion-3.5-medium",
        "data/prompts.jsonl",
        """\
# AWM: an image model learns from rewards with a flow-matching loss that advantages weight.
# `mmrl options awm` lists what else can be set.
recipe: awm
output_dir: $folder
model:
  path: $model  # diffusers folder or hub id; `mmrl list families`
  dtype: bfloat16
  height: 512
  width: 512
  gradient_checkpointing: true
data:
  path: $data  # a prompt a line (.txt), or rows with the column prompt (.jsonl)
# eval_data: {heldout: {path: data/prompts_test.jsonl, max_tasks: 64}}
rewards:  # `mmrl list rewards`; this one needs a download of the hub's yuvalkirstain/PickScore_v1
  - {name: pickscore, options: {path: weights/PickScore_v1, device: cuda}}
heldout_rewards:  # only measured, so that reward hacking shows
  - {name: jpeg_incompressibility}
sampler: {batch_rows: 8}
objective: {kl: {coef: 1.0e-4}}
trainer:
  steps: 200
  tasks_per_step: 16
  samples_per_task: 8  # images of each prompt
  micro_batch: 2  # images that fit into memory at once
  mixed_precision: bf16
""",
    ),
    "robot": Starter(
        "small",
        "data/demonstrations",
        """\
# A robot policy that imitates demonstrations, then is measured in a simulator; go on with `recipe: robot_grpo` and
# `model: {path: <folder of this run>}`. `mmrl options robot_clone` lists what else can be set.
recipe: robot_clone
output_dir: $folder
sim:  # the robot; your own: {kind: gymnasium, env: "my_robot.py:MyEnv"}
  kind: tabletop
  tasks: [reach, push]
  horizon: 40  # control steps of an episode
model: {kind: $model, chunk: 4}  # small, gaussian, vlm, ... ; chunk: actions that it predicts at once
demonstrations:
  # folder of a LeRobotDataset (v3) whose states, actions and images are those of `sim`: docs/data.md
  path: $data
eval_data:
  held_out: {tasks: [reach, push], split: held_out, layouts: 40}
evaluation: {every: 400, samples: 1, videos: 0}
trainer: {steps: 1200, tasks_per_step: 64, learning_rate: 1.0e-3}
""",
    ),
    "agent": Starter(
        "Qwen/Qwen3-4B-Instruct-2507",
        GRID,
        """\
# An agent that acts over several turns in an environment, with GiGPO. `mmrl options agent` lists what else can be set.
recipe: agent
output_dir: $folder
model:
  path: $model  # folder or hub id; a vision-language model where observations have images
  dtype: bfloat16  # float32 on a CPU
  gradient_checkpointing: true
  lora: {enabled: true, rank: 64, alpha: 128}
environment:
  factory: $data  # module:Class or my_env.py:Class with gymnasium's reset and step
  kwargs: $kwargs  # its arguments
  workers: 8
actions: {format: tag, on_parse_error: noop}  # the action is read from <action> ... </action>
episode: {max_turns: 10}
data: {seeds: 100000}  # initial states to train on
eval_data:
  heldout: {seeds: 100, first_seed: 1000000}
objective: {preset: gigpo}
sampler: {max_new_tokens: 256}
trainer:
  steps: 100
  tasks_per_step: 8
  samples_per_task: 8  # episodes of each initial state
  micro_batch: 4
  learning_rate: 1e-5
""",
    ),
}
"""Starters by their name in `mmrl init`."""
