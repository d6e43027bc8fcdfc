"""The generalised Jensen-Shannon divergence of GKD, by TRL."""

from tests.golden.make.peers import gradient, numbers, package, tensors, write
from tests.golden.make.tokens import ensure_torchvision

BETAS = (0.0, 0.1, 0.5, 1.0)
TEMPERATURE = 0.9


def main() -> None:
    ensure_torchvision()
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    inputs = {
        "logits": numbers(1, 2, 4, 7, low=-4.0, high=4.0),
        "logits_teacher": numbers(2, 2, 4, 7, low=-4.0, high=4.0),
        "labels": [[3, 1, -100, -100], [0, 2, 6, 5]],
        "betas": list(BETAS),
        "temperature": TEMPERATURE,
    }
    b = tensors(inputs)
    b.logits.requires_grad_()
    answer = {"program": package("trl"), "calls": ["GKDTrainer.generalized_jsd_loss"], "relative": 1e-13}
    for beta in BETAS:
        loss = GKDTrainer.generalized_jsd_loss(b.logits, b.logits_teacher, b.labels, beta, TEMPERATURE)
        answer[f"beta {beta:g}"] = {"loss": loss.detach(), "gradient": gradient(loss, b.logits)}
    write("gkd", "GKD, arXiv 2306.13649, eq. 1", inputs, [answer])


if __name__ == "__main__":
    main()
