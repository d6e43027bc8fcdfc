"""Shapes, digits, words, tiny pipelines and the demo."""

DEMOS = {"diffusion": ("diffusion.toy.diffusion_demo", "runs/diffusion-demo")}
"""Module and run folder of each demo of `mmrl demo`."""
_DIGITS = "this suite; scans of E. Alpaydin and C. Kaynak, UCI repository, 1998"
IMAGE_REWARDS = {
    "shapes_geneval": {
        "function": "diffusion.toy.shapes.geneval:shapes_geneval",
        "summary": (
            "fraction of what the caption asks for that the image shows: shapes, counts, colours, relation, nothing "
            "else"
        ),
        "citation": "after GenEval, arXiv 2310.11513, but with nothing else; graded as in Flow-GRPO, arXiv 2505.05470",
        "range": (0.0, 1.0),
    },
    "shapes_geneval_strict": {
        "function": "diffusion.toy.shapes.geneval:shapes_geneval_strict",
        "summary": "1 if the image shows exactly what the caption asks for and nothing else, otherwise 0",
        "citation": "this suite; stricter than GenEval, arXiv 2310.11513, which accepts more objects than "
        "were asked for",
        "range": (0.0, 1.0),
    },
    "shapes_judge": {
        "function": "diffusion.toy.shapes.judge:shapes_judge",
        "summary": (
            "probability of the correct counts under a network with a different architecture; for evaluation, not "
            "for training"
        ),
        "citation": "this suite", "range": (0.0, 1.0),
        "needs": "the option path; trains for 40 seconds on first use",
    },
    "class_prob": {
        "function": "diffusion.toy.digits:class_prob",
        "summary": "probability of the captioned handwritten digit under a logistic regression", "citation": _DIGITS,
        "range": (0.0, 1.0), "needs": "scikit-learn",
    },
    "class_log_prob": {
        "function": "diffusion.toy.digits:class_log_prob", "summary": "logarithm of class_prob", "citation": _DIGITS,
        "range": (None, 0.0), "needs": "scikit-learn",
    },
    "class_prob_judge": {
        "function": "diffusion.toy.digits:class_prob_judge",
        "summary": (
            "probability of the captioned digit under a network trained on other scans; for evaluation, not for "
            "training"
        ),
        "citation": _DIGITS, "range": (0.0, 1.0), "needs": "scikit-learn",
    },
    "moving_digit": {
        "function": "diffusion.toy.clips:moving_digit", "summary": "moving_digit_shape times moving_digit_direction",
        "citation": _DIGITS, "range": (0.0, 1.0), "video": True, "needs": "scikit-learn",
    },
    "moving_digit_shape": {
        "function": "diffusion.toy.clips:moving_digit_shape",
        "summary": "probability of the prompt's digit under a logistic regression, averaged over the frames of a video",
        "citation": _DIGITS, "range": (0.0, 1.0), "video": True, "needs": "scikit-learn",
    },
    "moving_digit_direction": {
        "function": "diffusion.toy.clips:moving_digit_direction",
        "summary": "fraction of a video's steps in which the centre of brightness moves in the prompt's direction",
        "citation": "this suite", "range": (0.0, 1.0), "video": True,
    },
    "moving_digit_judge": {
        "function": "diffusion.toy.clips:moving_digit_judge",
        "summary": (
            "digit and direction, judged by a network trained on other scans and by matching frames; for "
            "evaluation, not for training"
        ),
        "citation": _DIGITS, "range": (0.0, 1.0), "video": True, "needs": "scikit-learn",
    },
    "word_match": {
        "function": "diffusion.toy.words:word_match",
        "summary": (
            "correlation of the image with the most similar drawing of the quoted word; for evaluation, not for "
            "training"
        ),
        "citation": "this suite", "range": (0.0, 1.0),
    },
    "caption_colour": {
        "function": "diffusion.toy.shapes.colour:caption_colour",
        "summary": "closeness of the pixels to the colours in the caption", "citation": "this suite",
        "range": (0.0, 1.0),
    },
    "caption_position": {
        "function": "diffusion.toy.shapes.colour:caption_position",
        "summary": "distance between two colours' centres of mass along the caption's relation",
        "citation": "this suite", "range": (-1.0, 1.0),
    },
}  # fmt: skip
"""Fields of each row of `diffusion.rewards.IMAGE_REWARDS` that judges the toys."""
