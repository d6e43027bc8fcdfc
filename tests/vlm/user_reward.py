"""Faulty rewards, as users may write them."""


def sometimes(prompts, completions, *, answer, **columns):
    if "1" in answer:
        raise ValueError("refused: an answer of 1")
    return [1.0 for _ in completions]


def always(prompts, completions, **columns):
    raise RuntimeError("broken")


def length(prompts, completions, **columns):
    return [float(tokens) for tokens in columns["completion_lengths"]]


def characters(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


def letters(prompts, completions, **columns):
    return [sum(character.isalpha() for character in text) / max(len(text), 1) for text in completions]


def code_points(completions, **columns):
    """Differs between answers of an untrained model."""
    return [sum(map(ord, text)) % 7 / 6 for text in completions]


def brightness(prompts, completions, images, **columns):
    return [sum(image.convert("L").getpixel((0, 0)) for image in own) for own in images]


def rarely(completions, **_):
    """1 for a fifth of all texts, whatever they say, so that some groups have a right answer and others none."""
    return [float(sum(text.encode()) % 5 == 0) for text in completions]
