"""Screen grounding: coordinates, answers, rewards and AEPO."""
