"""ORPO by TRL.

python -m tests.golden.make.orpo
"""

from tests.golden.make.pairs import pairs, trl_without_reference
from tests.golden.make.peers import write


def main() -> None:
    from trl.experimental.orpo import ORPOTrainer

    inputs = pairs()
    peer = trl_without_reference(inputs, ORPOTrainer, beta=0.1)
    write("orpo", "ORPO, arXiv 2403.07691", inputs, [peer | {"options": {}}])


if __name__ == "__main__":
    main()
