"""The tool loop of TRL's GRPOTrainer with the calls of `slow_tools`; only what samples is replaced."""

from __future__ import annotations

import json
import time
from importlib import resources
from pathlib import Path
from typing import Any


class ToolLoop:
    """A GRPOTrainer whose model calls a tool in each turn and then answers.

    Args:
        model: folder of a tiny model.
        turns: calls of each episode.
        sleep: case, seed and turn to the seconds of a call.
    """

    def __init__(self, model: Path, turns: int, sleep: Any) -> None:
        import datasets
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        tokenizer = AutoTokenizer.from_pretrained(model)
        # one that TRL knows how to parse
        tokenizer.chat_template = (resources.files("trl") / "chat_templates/qwen3.jinja").read_text(encoding="utf-8")
        self._turns, self._tokenizer = turns, tokenizer

        def wait(case: str, seed: int, turn: int) -> str:
            """Sleep.

            Args:
                case: what is measured.
                seed: the episode.
                turn: its turn.
            """
            time.sleep(sleep(case, seed, turn))
            return f"turn {turn}"

        options: dict[str, Any] = {
            "output_dir": str(model / "trl"),
            "use_cpu": True,
            "report_to": "none",
            "bf16": False,
        }
        trainer: Any = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model),
            reward_funcs=_no_reward,
            args=GRPOConfig(**options, num_generations=2, max_completion_length=100_000),
            train_dataset=datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": "Call a tool."}]] * 2}),
            processing_class=tokenizer,
            tools=[wait],
        )
        self._wait = wait
        trainer._generate_single_turn = self._sample
        self._trainer = trainer

    def seconds(self, case: str, episodes: int) -> float:
        """Wall time of a rollout of so many episodes."""
        self._turn, self._calls, self._case = 0, 0, case
        prompts = [[{"role": "user", "content": "Call a tool."}] for _ in range(episodes)]
        # as `_generate_and_score_completions` does before a rollout
        self._trainer._sync_tool_dicts = [{"wait": self._wait}] * episodes
        self._trainer._async_tool_dicts = [{}] * episodes
        began = time.perf_counter()
        self._trainer._generate(prompts)
        wall_s = time.perf_counter() - began
        if self._calls != episodes * self._turns:
            raise RuntimeError(f"TRL ran {self._calls} calls of {episodes} episodes with {self._turns} turns each")
        return wall_s

    def _sample(self, prompt_ids: list[list[int]], *rest: Any, **options: Any) -> tuple[list[list[int]], None]:
        """The next turn of all episodes; they stay together, since all have as many turns."""
        texts = []
        for seed in range(len(prompt_ids)):
            call = {"name": "wait", "arguments": {"case": self._case, "seed": seed, "turn": self._turn}}
            texts.append(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" if self._turn < self._turns else "Done.")
        self._calls += len(texts) if self._turn < self._turns else 0
        self._turn += 1
        ends = [self._tokenizer.eos_token_id]
        return [self._tokenizer(text, add_special_tokens=False)["input_ids"] + ends for text in texts], None


def _no_reward(completions: list[Any], **columns: Any) -> list[float | None]:
    return [0.0] * len(completions)
