"""A teacher: a frozen model, or the policy itself, that scores the policy's answers under its own prompt."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmrl.core.blocks.divergence import generalized_jsd
from mmrl.core.logprobs import CHUNK_ELEMENTS
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import rare
from mmrl.runs.export import model_folder
from mmrl.training.processes import Streams
from mmrl.vlm.data.prompt import Prompt, VlmPayload
from mmrl.vlm.data.task import TaskError, VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy, load_policy
from mmrl.vlm.methods.augmentation import augment_task, rewrite_question
from mmrl.vlm.model.model_config import FrozenModelConfig
from mmrl.vlm.model.network import build_model_if_missing, processor_folder, resolve_model
from mmrl.vlm.model.processor import load_processor

TEACHER = "teacher"
"""View of a payload with the teacher's prompts."""
NEVER = -1e30
"""Logit of a banned token: a probability of 0 with a finite logarithm, so that 0 times it is 0."""


@dataclass
class TeacherConfig(FrozenModelConfig):
    """The model that responses are compared with: a frozen one, or the policy given a more informative prompt."""

    path: str = ""
    """Model folder, run folder or hub id of a frozen model with the policy's tokenizer. Default: the current policy
    itself, which then needs a `prompt`."""
    prompt: str = rare("")
    """Question for the teacher, with {question} and columns of the row in braces, such as "{question} The answer is
    {answer}." Default: the policy's question."""

    def validate(self) -> None:
        """Check that teacher and policy can differ; raises ValueError."""
        super().validate()
        read = ("min_pixels", "max_pixels", "max_prompt_tokens", "thinking")
        if given := next((name for name in read if getattr(self, name) is not None), None):
            raise ValueError(
                f"teacher.{given} is set, but the teacher reads prompts in the same way as the policy; use "
                f"model.{given}"
            )
        if not (self.path or self.prompt):
            raise ValueError(
                "teacher has neither path nor prompt, so it would be the policy itself; set a model with teacher.path, "
                'or a more informative prompt such as teacher.prompt="{question} The answer is {answer}."'
            )

    def check_columns(self, tasks: Sequence[VlmTask]) -> None:
        """Reject a prompt with columns that a question lacks; raises UserError."""
        wanted = set(re.findall(r"\{(\w+)\}", self.prompt)) - {"question"}
        for task in tasks if wanted else ():
            if missing := sorted(name for name in wanted if task.columns.get(name) is None):
                raise UserError(
                    f"teacher.prompt contains {{{missing[0]}}}, but question {task.id} has no column '{missing[0]}'; "
                    f"columns: {', '.join(task.columns)}"
                )


class TeacherPrompts:
    """The view of each prompt that the teacher reads."""

    def __init__(self, template: str) -> None:
        self.template = template

    def __call__(self, payload: VlmPayload, policy: VlmPolicy, streams: Streams) -> VlmPayload:
        """Add the teacher's prompts of all questions."""
        prompts: list[Prompt | None] = []
        for task in payload.tasks:
            values = {name: str(value) for name, value in task.columns.items()}
            asked = augment_task(task, messages=rewrite_question(task, self.template, **values))
            try:
                prompts.append(policy.encode(asked))
            except TaskError as error:
                raise UserError(f"{error} (question {task.id} with teacher.prompt)") from error
        return dataclasses.replace(payload, views={**payload.views, TEACHER: prompts})


class Teacher:
    """Scores rollouts with a teacher; nothing has a gradient through it.

    A frozen model is loaded when it is first asked: rollout workers never do.

    Args:
        config: which model and prompt.
        policy: the policy that is taught.
        temperature: of scoring.

    Raises:
        UserError: the teacher has another tokenizer than the policy.
    """

    def __init__(self, config: TeacherConfig, policy: VlmPolicy, temperature: float) -> None:
        self.config = config
        self.policy = policy
        self.temperature = temperature
        self.view = TEACHER if config.prompt else "original"
        options = {item.name: getattr(config, item.name) for item in dataclasses.fields(FrozenModelConfig)}
        self._options = FrozenModelConfig(**options)
        if config.path:
            build_model_if_missing(self._options)
            base, adapter = resolve_model(model_folder(config.path))
            own = policy.processor.tokenizer.get_vocab()
            other = load_processor(processor_folder(base, adapter)).tokenizer.get_vocab()
            if own != other:
                raise UserError(
                    f"teacher.path is {config.path}, whose tokenizer has {len(other)} tokens, which are not the "
                    f"{len(own)} tokens of the policy; distillation compares token by token and needs the same "
                    "tokenizer"
                )

    @functools.cached_property
    def _frozen(self) -> VlmPolicy:
        return load_policy(self._options).requires_grad_(False)

    @property
    def model(self) -> VlmPolicy:
        """The model that scores, on the policy's device."""
        return self._frozen.to(self.policy.device) if self.config.path else self.policy

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Outputs (B, T) of the teacher; a scorer of `Passes`, which hands over the policy."""
        with torch.no_grad():
            return self.model(rollouts, view=self.view, temperature=self.temperature, outputs=outputs)

    def divergence(self, states: Tensor, rollouts: Rollouts, beta: float) -> Tensor:
        """`generalized_jsd` (B, T) between policy and teacher over the vocabulary; 0 where the mask is 0.

        Args:
            states: (M, H), the policy's last states before the tokens under the mask.
            rollouts: the rows.
            beta: of the divergence.

        Gradient: through states and the policy's head; no more than a chunk of logits is held.
        """
        with torch.no_grad():
            others = self.model.states(rollouts, view=self.view)
        rows = max(1, CHUNK_ELEMENTS // self.policy.head.entries)
        pairs = zip(states.split(rows), others.split(rows), strict=True)
        found = torch.cat([checkpoint(self._chunk, *pair, beta, use_reentrant=False) for pair in pairs])
        zeros = torch.zeros(rollouts.mask.shape, dtype=found.dtype, device=found.device)
        return zeros.index_put(torch.nonzero(rollouts.mask, as_tuple=True), found)

    def _chunk(self, states: Tensor, others: Tensor, beta: float) -> Tensor:
        # heads of one family may be padded to different widths behind the same tokens
        width = min(self.policy.head.entries, self.model.head.entries)
        return generalized_jsd(
            self._logp(self.policy, states, width), self._logp(self.model, others, width).detach(), beta
        )

    def _logp(self, model: VlmPolicy, states: Tensor, width: int) -> Tensor:
        logits = model.head.logits(states)[:, :width]
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / self.temperature
        banned = self.policy.banned_ids
        return logits.index_fill(1, banned[banned < width], NEVER).log_softmax(-1)
