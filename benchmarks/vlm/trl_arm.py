"""One GRPO step of TRL's GRPOTrainer through its public interface; wrappers only read the clock."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.measure import Recorder
from benchmarks.vlm.workload import Shape, checksum_reward, shape_of, suppressed_tokens
from mmrl.errors import UserError


def check_installed() -> None:
    """Raise UserError with the install command if TRL is missing."""
    from importlib.util import find_spec

    if find_spec("trl") is None:
        raise UserError("--against trl needs TRL, which is not installed: pip install 'mmrl-suite[bench]'")


def step_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Whole steps of GRPOTrainer: one prompt with its group, one update, AdamW.

    Args:
        options: model, data, shape, repetitions, device and gradient_checkpointing.
    """
    from mmrl.hub.compat import ensure_number_words, ensure_torchvision

    ensure_torchvision()
    ensure_number_words()
    from trl import GRPOTrainer

    shape = shape_of(options["shape"])
    model, processor = _load(options["model"], options["device"])
    recorder = Recorder(options["device"])
    lengths: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=_reward(lengths),
            args=_arguments(options, shape, processor, folder),
            train_dataset=_questions(options["data"]),
            processing_class=processor,
            callbacks=[_clock(recorder)],
        )
        _time_stages(trainer, recorder)
        trainer.train()
    return recorder.result() | {"counts": {"completion_tokens": sum(lengths) / len(lengths)}}


def _load(path: str, device: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoConfig, AutoProcessor

    from mmrl.vlm.model.network import auto_class

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    auto = auto_class(AutoConfig.from_pretrained(path).model_type, path)
    model = auto.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    return model, AutoProcessor.from_pretrained(path, padding_side="left")


def _arguments(options: dict[str, Any], shape: Shape, processor: Any, folder: str) -> Any:
    """TRL's fastest settings; everything that is not named is its default."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=shape.group,
        num_generations=shape.group,
        max_completion_length=shape.completion,
        max_steps=options["repetitions"] + 1,
        beta=0.0,
        gradient_checkpointing=options["gradient_checkpointing"],
        bf16=options["device"] == "cuda",
        use_cpu=options["device"] == "cpu",
        generation_kwargs={
            "suppress_tokens": suppressed_tokens(options["model"], getattr(processor, "tokenizer", processor))
        },
        max_grad_norm=1.0,
        log_completions=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _questions(path: str) -> Any:
    import datasets

    from mmrl.vlm.data.dataset import DataConfig, load_tasks

    tasks = load_tasks(DataConfig(path=path)).tasks
    text = [item["text"] for task in tasks for item in task.messages[0]["content"] if item["type"] == "text"]
    columns: dict[str, Any] = {"prompt": [[{"role": "user", "content": question}] for question in text]}
    if not any(task.images for task in tasks):
        return datasets.Dataset.from_dict(columns)
    columns["image"] = [task.load_images()[0] for task in tasks]
    return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())


def _reward(lengths: list[int]) -> Callable[..., list[float | None]]:
    def reward(completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        lengths.extend(map(len, completion_ids))
        return [*checksum_reward([], [turns[0]["content"] for turns in completions])]

    return reward


def _clock(recorder: Recorder) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            _time_optimizer(recorder, objects["optimizer"])
            recorder.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            recorder.lap()

    return Clock()


def _time_stages(trainer: Any, recorder: Recorder) -> None:
    model = trainer.model
    model.generate = _timed(recorder, ("generate",), model.generate)
    trainer.compute_loss = _timed(recorder, ("update", "forward"), trainer.compute_loss)
    trainer.accelerator.backward = _timed(recorder, ("update", "backward"), trainer.accelerator.backward)


def _time_optimizer(recorder: Recorder, optimizer: Any) -> None:
    inner = getattr(optimizer, "optimizer", optimizer)  # out of accelerate's wrapper
    step = contextlib.ExitStack()

    def begin(*_: Any) -> None:
        for stage in ("update", "optimizer"):
            step.enter_context(recorder.watch.stage(stage))

    inner.register_step_pre_hook(begin)
    inner.register_step_post_hook(lambda *_: step.close())


def _timed(recorder: Recorder, stages: tuple[str, ...], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for stage in stages:
                stack.enter_context(recorder.watch.stage(stage))
            return function(*arguments, **keywords)

    return call
