"""Supervised fine-tuning: the loss that transformers computes for causal language models."""

import torch

from tests.golden.make.peers import gradient, numbers, package, write
from tests.golden.make.tokens import ensure_torchvision


def main() -> None:
    ensure_torchvision()
    from transformers.loss.loss_utils import ForCausalLMLoss

    inputs = {"logits": numbers(1, 3, 6, 7, low=-4, high=4)}
    labels = [[-100, 3, 0, 6, 1, 2], [-100, -100, 5, 5, -100, -100], [-100, 1, 4, -100, -100, -100]]
    inputs["labels"] = labels
    logits = torch.tensor(inputs["logits"], dtype=torch.float32, requires_grad=True)
    loss = ForCausalLMLoss(logits, torch.tensor(labels), vocab_size=7)
    peer = {"program": package("transformers"), "calls": ["transformers.loss.loss_utils.ForCausalLMLoss"]}
    peer |= {"relative": 1e-6, "because": "it computes in float32"}
    peer |= {"loss": loss.detach(), "gradient": gradient(loss, logits)}
    write("sft", "maximum likelihood of the answers' tokens", inputs, [peer])


if __name__ == "__main__":
    main()
