"""Rewards that go wrong, as users' do."""


def sometimes(prompts, completions, **columns):
    if len(completions) == 1 and columns["completion_lengths"][0] > 5:
        raise ValueError("refused: too long")
    if len(completions) > 1:
        raise ValueError("refused: too many")
    return [1.0]


def always(prompts, completions, **columns):
    raise RuntimeError("broken")


def length(prompts, completions, **columns):
    return [float(tokens) for tokens in columns["completion_lengths"]]
