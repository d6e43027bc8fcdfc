"""Mail triage: open mails and archive, delete or star them."""

from __future__ import annotations

from random import Random

from mmrl.gui.toy.tasks.case import Case, Move, View, click

SENDERS = ("Ada", "Ben", "Chloe", "Dan", "Emma", "Finn", "Gina")
SUBJECTS = ("Invoice", "Dinner", "Meeting", "Photos", "Offer", "Report", "Tickets")
WISHES = {"archive": "archive", "trash": "delete", "star": "star"}
MOST_MAILS = 7


def make(draw: Random, sub_goals: int, distractors: int) -> Case:
    """A case; distractors are mails that must stay, some with the same sender or subject as a target."""
    count = min(MOST_MAILS, sub_goals + distractors)
    pairs = list(zip(draw.sample(SENDERS, count), draw.sample(SUBJECTS, count), strict=True))
    for index in range(sub_goals, count):  # half of a wanted mail's heading
        if draw.random() < 0.5:
            sender, subject = pairs[draw.randrange(sub_goals)]
            mixed = (sender, pairs[index][1]) if draw.random() < 0.5 else (pairs[index][0], subject)
            pairs[index] = mixed if mixed not in pairs else pairs[index]
    mails = [
        {"id": f"m{index}", "sender": sender, "subject": subject, "body": f"Hello, this is about: {subject.lower()}."}
        for index, (sender, subject) in enumerate(pairs)
    ]
    wanted = [{"id": mail["id"], "kind": draw.choice(sorted(WISHES))} for mail in mails[:sub_goals]]
    text = ", ".join(
        f'{WISHES[want["kind"]]} the mail "{mail["subject"]}" from {mail["sender"]}'
        for want, mail in zip(wanted, mails, strict=False)
    )
    draw.shuffle(mails)
    return Case(f"{text[0].upper()}{text[1:]}.", {"title": "Mail", "mails": mails, "wanted": wanted})


def expert(case: Case, view: View) -> Move:
    """The next move."""
    now = {mail["id"]: mail for mail in view.state["mails"]}
    for want in case.config["wanted"]:
        mail = now[want["id"]]
        if mail["star"] if want["kind"] == "star" else mail["place"] == want["kind"]:
            continue
        if view.state["open"] == mail["id"]:
            return click(view, want["kind"])
        return click(view, "back" if view.state["open"] else f"open-{mail['id']}")
    return "finish", {}
