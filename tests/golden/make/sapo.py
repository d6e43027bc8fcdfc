"""SAPO by verl, TRL and SkyRL."""

from types import SimpleNamespace

from tests.golden.make.peers import write
from tests.golden.make.tokens import COUNT_EPS, SkyRl, Trl, Verl, batch


def main() -> None:
    inputs = batch()
    verl = Verl(inputs)
    advantage = verl.advantage("compute_grpo_outcome_advantage")
    loss = verl.policy_loss("sapo", advantage, "seq-mean-token-mean")
    trl = Trl(inputs).grpo(advantage[:, 0], "sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
    trl |= {"relative": 2e-7, "because": "its temperatures are float32"}
    sky, taus = SkyRl(inputs), SimpleNamespace(tau_pos=1.0, tau_neg=1.05)
    third = sky.answer("sapo_policy_loss", loss=sky.loss("sapo_policy_loss", advantage, "sequence_mean", sapo=taus))
    write(
        "sapo",
        "SAPO, arXiv 2511.20347",
        inputs,
        [verl.answer(advantage, loss, **COUNT_EPS | {"relative": 3e-8}), trl, third],
    )


if __name__ == "__main__":
    main()
