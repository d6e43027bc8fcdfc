"""Diffusion-DPO on noise predictions by its public code, and on velocities by Flow-GRPO's."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from tests.golden.make.peers import Clone, Made, doubles, gradient, numbers, tensors

NOISE = ("SalesforceAIResearch/DiffusionDPO", "5233e75919f912f3f631958ee4ebb5b5204382d9", "train.py", 1123, 1145)
FLOW = ("yifan123/flow_grpo", "ac4c86e8cae021841f1fde853d340e0db67690dd", "scripts/train_sd3_dpo.py", 924, 939)
PAIRS = 3
SHAPE = (2 * PAIRS, 2, 3, 3)


def make(*paths: str) -> Made:
    clones = [Clone(path, *source[:2]) for path, source in zip(paths, (NOISE, FLOW), strict=True)]
    shared = numbers(31, PAIRS, *SHAPE[1:], low=-2.0, high=2.0)
    inputs = {
        "latents": numbers(30, *SHAPE, low=-2.0, high=2.0),  # preferred images, then rejected ones
        "noise": [*shared, *shared],
        "prediction": numbers(32, *SHAPE, low=-2.0, high=2.0),
        "prediction_ref": numbers(33, *SHAPE, low=-2.0, high=2.0),
        "beta": 4.0,
    }
    near = (0.999 * torch.tensor(inputs["prediction"]) + 0.001 * torch.tensor(inputs["prediction_ref"])).tolist()
    given = {"prediction_ref": near, "beta": 5000.0}  # the row's beta is for policies near their reference
    peers = [by_noise(clones[0], inputs), by_velocity(clones[1], inputs)]
    peers += [{"inputs": given} | by_noise(clones[0], inputs | given)]
    return "Diffusion-DPO, arXiv 2311.12908", inputs, peers, *clones


def by_noise(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    b = tensors(inputs)
    prediction = b.prediction.requires_grad_()
    found = clone.lines(
        *NOISE[2:],
        model_pred=prediction,
        target=b.noise,
        unet=None,
        ref_unet=lambda *_, **__: SimpleNamespace(sample=b.prediction_ref),
        model_batch_args=(),
        added_cond_kwargs=None,
        args=SimpleNamespace(beta_dpo=b.beta),
        F=functional,
    )
    return answer(clone, NOISE, "noise", found.loss, prediction)


def by_velocity(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    b = tensors(inputs)
    prediction = b.prediction.requires_grad_()
    with doubles():
        found = clone.lines(
            *FLOW[2:],
            model_pred=prediction,
            model_pred_ref=b.prediction_ref,
            noise=b.noise,
            model_input=b.latents,
            bsz=PAIRS,
            config=SimpleNamespace(train=SimpleNamespace(beta=b.beta)),
            F=functional,
            info=Anything(),
        )
    return answer(clone, FLOW, "velocity", found.loss, prediction)


class Anything:
    """A table that takes every entry."""

    def __getitem__(self, name: str) -> list[Any]:
        return []


def answer(clone: Clone, source: tuple[Any, ...], kind: str, loss: torch.Tensor, leaf: torch.Tensor) -> dict[str, Any]:
    numbers_of = {"loss": loss.mean().detach(), "gradient": gradient(loss.mean(), leaf)}
    call = f"{source[2]}:{source[3]}-{source[4]}"
    return {"program": clone.name, "calls": [call], "predicts": kind, "relative": 1e-12, **numbers_of}
