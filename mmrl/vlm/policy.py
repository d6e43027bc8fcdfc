"""The policy: a vision-language model that scores rollouts and computes each prompt once for its whole group."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from mmrl.core.logprobs import linear_logprobs
from mmrl.core.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.hub.video_sampling import Frames
from mmrl.vlm.chat import PromptLayout, encode_prompt, encode_turn
from mmrl.vlm.model_config import ModelConfig
from mmrl.vlm.packing import PackedRows, pack_prompts, pack_rows, tabulate
from mmrl.vlm.payload import Prompt, VlmPayload
from mmrl.vlm.prefix import Prefix
from mmrl.vlm.prefix_store import PrefixStore
from mmrl.vlm.reading import Reading, joined_rows, make_reading, pack_reading
from mmrl.vlm.shared_attention import ATTENTION_NAME, PromptRow, ResponseRow, prompt_index, response_index
from mmrl.vlm.special_tokens import banned_ids, eos_ids
from mmrl.vlm.storage import load_policy_weights, save_policy
from mmrl.vlm.task import VlmTask
from mmrl.vlm.vision import FeatureCache, VisionFeatures, gather_features
from mmrl.vlm.weights_state import weights_state

OUTPUTS = frozenset({"logp", "entropy", "values"})


class VlmPolicy(nn.Module):
    """A causal language model with a vision tower, as an actor and optionally a critic."""

    model: Any
    value_head: nn.Module | None
    banned_ids: Tensor

    def __init__(
        self, model: nn.Module, processor: Any, config: ModelConfig, value_head: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.processor = processor
        self.config = config
        self.value_head = value_head
        tokenizer = processor.tokenizer
        self.eos_ids = eos_ids(self.network, tokenizer)
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos_ids[0]
        self.register_buffer("banned_ids", banned_ids(self.network, tokenizer), persistent=False)
        self.features = FeatureCache()
        self.prefixes = PrefixStore(self)
        self._adapter_off = False

    def __deepcopy__(self, memo: dict[int, Any]) -> VlmPolicy:
        """A copy shares a frozen vision tower and its features with the original, and starts without prefixes."""
        tower = self.network.model.visual
        if not any(parameter.requires_grad for parameter in tower.parameters()):
            memo[id(tower)], memo[id(self.features)] = tower, self.features
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "prefixes"})
        copied.prefixes = PrefixStore(copied)
        return copied

    @property
    def network(self) -> Any:
        """The transformers model, out of its peft wrapper."""
        return self.model.base_model.model if self.has_adapter else self.model

    @property
    def has_adapter(self) -> bool:
        """Whether the model carries LoRA adapters."""
        return hasattr(self.model, "peft_config")

    @property
    def device(self) -> torch.device:
        """Device of the language model's head."""
        return self.network.lm_head.weight.device

    @property
    def shares_prefix(self) -> bool:
        """Whether the prompt is computed once for its group; else once for each response."""
        return self.network.config.text_config._attn_implementation == ATTENTION_NAME  # type: ignore[no-any-return]

    @property
    def positions(self) -> int:
        """Tokens of prompt and response that the model has positions for."""
        return int(self.network.config.text_config.max_position_embeddings)

    def check_response_length(self, max_new_tokens: int) -> None:
        """Refuse responses that fit after no prompt; raises UserError."""
        if max_new_tokens >= self.positions:
            raise UserError(
                f"sampler.max_new_tokens is {max_new_tokens}, but {self.config.path} has {self.positions} positions "
                "for prompt and response together; make it smaller"
            )

    @property
    def layout(self) -> PromptLayout:
        """What the encoding of prompts needs to know of this model."""
        network = self.network
        longest = self.positions - 1
        limit = self.config.max_prompt_tokens
        own = limit is not None and limit <= longest
        return PromptLayout(
            patch_size=int(network.config.vision_config.patch_size),
            max_tokens=limit if own and limit is not None else longest,
            limit_source="model.max_prompt_tokens" if own else "what the model's positions leave for a prompt",
            merge_size=int(network.config.vision_config.spatial_merge_size),
            tokens_per_second=getattr(network.config.vision_config, "tokens_per_second", None),
        )

    def encode(
        self, task: VlmTask, images: Sequence[Image.Image] | None = None, videos: Sequence[Frames] | None = None
    ) -> Prompt:
        """Turn a task into a prompt."""
        return encode_prompt(task, self.processor, self.layout, images, videos)

    def encode_turn(
        self, task: VlmTask, images: Sequence[Image.Image] | None = None, *, answered: bool = True
    ) -> Prompt:
        """Turn the user's next message into what stands between two answers; see `mmrl.vlm.chat.encode_turn`.

        Returns:
            Its tokens and pixels, with positions from 0.
        """
        return encode_turn(task, self.processor, self.layout, answered=answered, images=images)

    def forward(
        self,
        rollouts: Rollouts,
        *,
        view: str = "original",
        temperature: float = 1.0,
        outputs: frozenset[str] = frozenset({"logp"}),
    ) -> PolicyOutputs:
        """Score the sampled tokens of every row.

        Returns:
            Scores (B, T) float32, 0 where the mask is 0. The value is that of the state before each token.

        Gradient: flows into all trainable weights, that of the values only into the value head where
        `model.critic.stop_gradient` is set; each distinct prompt passes the vision tower once, and where
        `shares_prefix` the language model too.
        """
        self._check_outputs(outputs)
        states, targets, places = self._states(rollouts, view)
        return self._score(states, targets, places, rollouts.mask.shape, temperature, outputs)

    def states(self, rollouts: Rollouts, *, view: str = "original") -> Tensor:
        """Last hidden states before the tokens under the mask, such as those that critics of a recipe's own read.

        Returns:
            (M, H), the tokens row by row.

        Gradient: as in `forward`.
        """
        return self._states(rollouts, view)[0]

    def encode_prefix(self, prompts: Sequence[Prompt]) -> Prefix:
        """Run prompts through the vision tower and the language model, each once.

        Gradient: flows into all trainable weights.
        """
        device = self.device
        rows = pack_prompts(prompts, device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        shared = PromptRow(prompt_index(lengths))
        hidden = self.run(rows, gather_features(self.network.model, prompts, self.features), shared=shared)
        layers = range(len(shared.keys))
        return Prefix(
            keys=[shared.keys[layer] for layer in layers],
            values=[shared.values[layer] for layer in layers],
            lengths=lengths,
            next_position=torch.tensor([prompt.next_position for prompt in prompts], device=device),
            last_state=hidden[0, lengths.cumsum(0) - 1],
        )

    def weights_state(self) -> tuple[object, ...]:
        """Changes whenever the same prompt would be computed to other numbers: weights, adapter, precision."""
        kind = self.device.type
        precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return weights_state(self.parameters()), self._adapter_off, precision

    def _states(self, rollouts: Rollouts, view: str) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """States (M, H) before the tokens under the mask, these tokens (M,), and their rows and places."""
        payload = VlmPayload.of(rollouts)
        mask = rollouts.mask.to(self.device)
        reading = make_reading(payload, view, rollouts.group.to(self.device), mask)
        # responses that are alone with their prompt have nothing to share, and one row each is one pass less
        sharing = self.shares_prefix and (len(reading.lengths) > len(reading.prompts) or self.prefixes.is_open)
        states = self._shared_states(reading) if sharing else self._flat_states(reading)
        row, step = torch.nonzero(mask, as_tuple=True)
        return states, reading.targets, (row, step)

    def _flat_states(self, reading: Reading) -> Tensor:
        """States before the chosen tokens, every row with a prompt of its own."""
        prompts, group, lengths = reading.prompts, reading.group, reading.lengths
        if reading.inserts:  # the rows with their pictures are prompts of their own
            before = torch.tensor([len(prompt) for prompt in prompts], device=group.device)[group]
            prompts, group = joined_rows(reading), torch.arange(len(lengths), device=group.device)
            lengths = torch.zeros_like(lengths)
        table = tabulate(prompts, self.pad_id, group.device)
        rows = pack_rows(table, group, reading.tokens, lengths, self.pad_id)
        hidden = self.run(rows, gather_features(self.network.model, prompts, self.features))
        if not reading.inserts:
            before = table.lengths[group]
        return hidden[reading.row, before[reading.row] - 1 + reading.step]

    def _shared_states(self, reading: Reading) -> Tensor:
        """States before the chosen tokens, with each prompt computed once."""
        prefix = self.prefixes.get(reading.prompts, reading.view)
        lengths, group, row, step = reading.lengths, reading.group, reading.row, reading.step
        states = prefix.last_state
        if int(lengths.sum()):
            shared = ResponseRow(response_index(lengths, group, len(prefix)), prefix.real, prefix.keys, prefix.values)
            rows = pack_reading(reading, prefix.next_position[group])
            inserted = [insert.prompt for own in reading.inserts for insert in own]
            features = gather_features(self.network.model, inserted, self.features) if inserted else None
            states = torch.cat([states, self.run(rows, features, shared=shared)[0]])
        starts = len(prefix) + lengths.cumsum(0) - lengths
        # the first token of a row is predicted by the prompt's last state, which the group shares
        return states[torch.where(step == 0, group[row], starts[row] + step - 1)]

    def run(self, rows: PackedRows, features: VisionFeatures | None, **options: Any) -> Tensor:
        """Last hidden states of packed rows.

        Returns:
            (B, L, H).
        """
        embeddings, extra = self.embed(rows, features)
        language_model = self.network.model.language_model
        output = language_model(
            inputs_embeds=embeddings, position_ids=rows.positions, use_cache=False, **extra, **options
        )
        return output.last_hidden_state

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities of the next token, with the same banned tokens and temperature as in scoring.

        Returns:
            (b, V) float32.
        """
        weight = self.network.lm_head.weight
        with _no_autocast(states):
            logits = nn.functional.linear(states, weight.to(states.dtype)).float() / temperature
        return logits.index_fill(1, self.banned_ids, float("-inf")).log_softmax(-1)

    def embed(self, rows: PackedRows, features: VisionFeatures | None) -> tuple[Tensor, dict[str, Any]]:
        """Token embeddings with the image features in their places.

        Returns:
            (B, L, H) and the further arguments that the language model takes with them.
        """
        embeddings = self.network.get_input_embeddings()(rows.ids)
        if features is None:
            return embeddings, {}
        chosen = features.select(rows.features)
        flat = torch.nonzero(rows.visual.flatten()).flatten()
        tokens = chosen.tokens.to(embeddings.dtype)
        embeddings = embeddings.flatten(0, 1).index_copy(0, flat, tokens).view_as(embeddings)
        if not chosen.deepstack:
            return embeddings, {}
        return embeddings, {
            "visual_pos_masks": rows.visual,
            "deepstack_visual_embeds": list(chosen.deepstack),
        }

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Run the model without its LoRA adapters, as the reference of a KL term."""
        if not self.has_adapter:
            raise UserError("the model has no adapter to switch off; set model.lora.enabled or use a frozen copy")
        self._adapter_off = True
        try:
            with self.model.disable_adapter():
                yield
        finally:
            self._adapter_off = False

    def save_pretrained(self, path: Path | str) -> None:
        """Write model, processor and value head to a folder."""
        save_policy(self, Path(path))

    def load_weights(self, path: Path | str) -> None:
        """Load the weights that `save_pretrained` wrote into the existing parameters, bit for bit.

        Args:
            path: folder written by `save_pretrained` of a policy of the same shape.
        """
        load_policy_weights(self, Path(path))

    def _check_outputs(self, outputs: frozenset[str]) -> None:
        if not outputs <= OUTPUTS:
            raise ValueError(f"outputs={sorted(outputs)}; a policy scores: {', '.join(sorted(OUTPUTS))}.")
        if "values" in outputs and self.value_head is None:
            raise ValueError('outputs has "values" but the policy has no value head; load it with value_head=True.')

    def _score(
        self,
        states: Tensor,
        targets: Tensor,
        places: tuple[Tensor, Tensor],
        shape: torch.Size,
        temperature: float,
        outputs: frozenset[str],
    ) -> PolicyOutputs:
        """Scores of M states, put back to where they came from."""

        def spread(flat: Tensor) -> Tensor:
            return torch.zeros(shape, dtype=flat.dtype, device=flat.device).index_put(places, flat)

        states_read, head = states, self.network.lm_head.weight
        if not outputs & {"logp", "entropy"}:
            states_read, head = states.detach(), head.detach()
        result = linear_logprobs(
            states_read,
            head,
            targets,
            temperature=temperature,
            banned=self.banned_ids,
            entropy="entropy" in outputs,
        )
        values = None
        if "values" in outputs and self.value_head is not None:
            with _no_autocast(states):
                seen = states.detach() if self.config.critic.stop_gradient else states
                values = spread(self.value_head(seen.float()).squeeze(-1))
        entropy = spread(result.entropy) if result.entropy is not None else None
        return PolicyOutputs(logp=spread(result.logp), entropy=entropy, values=values)


def _no_autocast(x: Tensor) -> torch.autocast:
    """Heads work in the precision of the states, as `linear_logprobs` does, so that all scores agree."""
    return torch.autocast(device_type=x.device.type, enabled=False)
