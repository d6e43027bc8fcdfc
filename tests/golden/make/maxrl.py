"""MaxRL by SkyRL, advantages and loss."""

from tests.golden.make.peers import write
from tests.golden.make.tokens import SkyRl, batch


def main() -> None:
    inputs = batch()
    sky = SkyRl(inputs)
    advantage = sky.advantage("compute_maxrl_advantage")
    bounds = {"policy_loss_type": "regular", "eps_clip_low": 0.2, "eps_clip_high": 0.2}
    loss = sky.loss("ppo_policy_loss", advantage, "token_mean", **bounds)
    peers = [sky.answer("compute_maxrl_advantage", advantage=advantage), sky.answer("ppo_policy_loss", loss=loss)]
    write("maxrl", "MaxRL, arXiv 2602.02710", inputs, peers)


if __name__ == "__main__":
    main()
