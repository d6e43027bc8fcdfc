"""Helpers for tests of the report: a parser of its page, and an evaluation to show."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Tags, attributes and text of a page, and whether every element is closed."""

    VOID = frozenset({"meta", "img", "br", "link", "hr", "input"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["script"]:
            self.words.append(data)

    def sources(self):
        return [attributes["src"] for tag, attributes in self.attributes if tag == "img"]


def log_evaluation(tracker, step, tag, greedy):
    """Log greedy and sampled accuracy of 400 questions."""
    metrics = {"n": 400.0}
    for protocol, value in (("greedy", greedy), ("sampled", max(greedy - 0.04, 0.0))):
        metrics[f"accuracy/{protocol}"] = value
        metrics[f"accuracy/{protocol}/low"] = max(value - 0.05, 0.0)
        metrics[f"accuracy/{protocol}/high"] = value + 0.05
    tracker.evaluation(step, tag, "test", metrics)


def headings_of(page):
    """Titles of the figures of a page."""
    return [attributes.get("alt", "").partition(":")[0] for tag, attributes in page.attributes if tag == "img"]
