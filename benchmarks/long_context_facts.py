"""Facts to hide in text and the ways to say and to ask them: needles in RULER's manner, own words.

A fact gives a noun ("access code") of a key ("copper lantern") a value (digits, words, hex). Every
way to say it goes with every way to ask for it. The last HELD_OUT of each list are for evaluation
alone, so that its rows can tell wordings that were trained on from those that were not.
"""

import string
from dataclasses import dataclass

NOUNS = (
    "magic number", "access code", "secret value", "serial number", "pass phrase", "locker code",
    "reference", "ticket", "password", "launch code", "badge number", "token",
)  # fmt: skip
# {n} noun, {k} key, {K} key as a constant's name, {v} value
SAYINGS = (
    "The {n} of {k} is {v}.",
    "Remember this for later: the {n} for {k} is {v}.",
    "{k} was given the {n} {v}.",
    "A note to the reader: for {k}, the {n} was set to {v}.",
    "If anyone asks about {k}, its {n} is {v}.",
    "Somebody wrote on the wall: {k} has {n} {v}.",
    "# {n} of {k}: {v}",
    "# do not forget: {k} -> {v} ({n})",
    '{K} = "{v}"  # {n} of {k}',
    '{{"name": "{k}", "{n}": "{v}"}}',
    "| {k} | {n} | {v} |",
    "{v} is the {n} of {k}.",
    # for evaluation alone
    "Please keep in mind that {v} is what opens {k}: it is the {n}.",
    "In the archive, {k} is listed with {n} {v}.",
)
# A question, and how its answer begins; the value follows after a space, or at once after `"`.
ASKINGS = (
    ("What is the {n} of {k}?", "The {n} of {k} is"),
    ("What is the {n} for {k}?", "The {n} for {k} is"),
    ("Which {n} does {k} have?", "{k} has the {n}"),
    ("Question: {n} of {k}?", "Answer:"),
    ("Q: What was given above as the {n} of {k}?", "A:"),
    ("Find the {n} of {k} in the text above.", "It is"),
    ("# What is the {n} of {k}?", "#"),
    (">>> print({K})  # {n} of {k}", ""),
    ("", "As said before, the {n} of {k} is"),
    ("", "{n} of {k}:"),
    ("Look it up:", '{{"name": "{k}", "{n}": "'),
    ("", "| {k} | {n} |"),
    # for evaluation alone
    ("Tell me the {n} that belongs to {k}.", "The {n} that belongs to {k} is"),
    ("What does the text say about {k}?", "It says that the {n} is"),
)
HELD_OUT = 2
# A sequence's one fact without a key.
BARE_SAYINGS = (
    "The {n} is {v}. Remember it.",
    "The {n} is {v}. Remember it. {v} is the {n}.",
    "Here is the {n}: {v}. Keep it.",
)
BARE_ASKINGS = (
    ("What is the {n}?", "The {n} is"),
    ("What {n} is hidden in the text above?", "The {n} is"),
    ("Q: And the {n}?", "A:"),
)


@dataclass(frozen=True)
class Fact:
    """The noun of a key has a value; key is "" where a sequence has the noun once."""

    noun: str
    key: str
    value: str

    def fill(self, form):
        """A form with the fact's words in it."""
        constant = self.key.upper().replace(" ", "_").replace("-", "_")
        return form.format(n=self.noun, k=self.key, K=constant, v=self.value)


@dataclass(frozen=True)
class Asked:
    """Text up to the answer, and the answer as it is to be generated, its first space included."""

    text: str
    answer: str


def value(rng, words):
    """Digits mostly, else words or hexadecimal digits."""
    kind = rng.random()
    if kind < 0.6:
        first, *rest = rng.integers(0, 10, rng.integers(4, 9))
        return f"{max(first, 1)}" + "".join(map(str, rest))
    if kind < 0.75:
        return "-".join(_some(rng, words, rng.integers(1, 3)))
    if kind < 0.9:
        return _some(rng, words, 1)[0]
    return "".join(_some(rng, string.hexdigits[:16], 6))


def facts(rng, words, count):
    """`count` facts with keys of their own, in one or several nouns."""
    nouns = list(dict.fromkeys(_some(rng, NOUNS, rng.integers(1, 5))))
    keys = set()
    while len(keys) < count:
        parts = _some(rng, words, 1 if rng.random() < 0.3 else 2)
        keys.add((" ", "-")[rng.random() < 0.15].join(parts))
    return [Fact(_some(rng, nouns, 1)[0], key, value(rng, words)) for key in sorted(keys)]


def bare(rng, words):
    """A fact without a key, of a noun that `facts` does not use."""
    return Fact(str(rng.choice(("pass key", "hidden word", "final answer"))), "", value(rng, words))


def say(rng, fact, *, held_out=False):
    """A sentence, comment or line of code that states the fact."""
    return fact.fill(_choice(rng, SAYINGS if fact.key else BARE_SAYINGS, held_out and fact.key))


def ask(rng, fact, *, chat=False, held_out=False):
    """Asked: what comes before the answer; chat: as a turn of SmolLM2-Instruct."""
    askings = ASKINGS if fact.key else BARE_ASKINGS
    question, begin = (fact.fill(part) for part in _choice(rng, askings, held_out and fact.key))
    if chat:
        question = question or f"What is the {fact.noun} of {fact.key}?"
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        if rng.random() < 0.5 or not begin or begin in ("#", "A:", "Answer:"):
            return Asked(text, fact.value)
        return Asked(text + begin, _after(begin, fact.value))
    if question and begin:
        joint = " " if question[-1] in "?.:" and rng.random() < 0.5 else "\n"
        return Asked(question + joint + begin, _after(begin, fact.value))
    if not begin:
        return Asked(question + "\n", fact.value)
    return Asked(begin, _after(begin, fact.value))


def _after(begin, answer):
    return answer if begin.endswith('"') else f" {answer}"


def _some(rng, words, count):
    # rng.choice would make an array of all of them first
    return [words[i] for i in rng.integers(len(words), size=count)]


def _choice(rng, forms, held_out):
    if forms is SAYINGS or forms is ASKINGS:
        forms = forms[-HELD_OUT:] if held_out else forms[:-HELD_OUT]
    return forms[rng.integers(len(forms))]
