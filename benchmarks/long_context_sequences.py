"""Sequences to train and to evaluate on: text with facts in it, and questions that ask for them.

Everything follows from (seed, number of the sequence): the same text file gives the same data.
"""

from dataclasses import dataclass

import numpy as np
from long_context_facts import ask, bare, facts, say
from long_context_text import KINDS

# Facts and questions in a training sequence, at most; a fact and its question take 50 tokens.
MOST_FACTS = 128
TOKENS_PER_FACT = 160
# Share of sequences: questions at the end, in the last tenth, all along.
PLACES = (0.5, 0.2, 0.3)
# Share of sequences whose questions are chat turns, and of those with a fact without a key.
CHAT, BARE = 0.25, 0.3


@dataclass(frozen=True)
class Sequence:
    """Token ids [L] with what is supervised in them.

    ids: [L] int64.
    answers: (start, stop) of each answer, in tokens; the tokens before start are its question.
    plain: [L] bool, the token is one of the text around the needles.
    """

    ids: np.ndarray
    answers: list
    plain: np.ndarray


@dataclass(frozen=True)
class Probe:
    """One prefix [P] with facts in it, and questions about it that do not see each other.

    questions: (ids [S], start, depth): the answer is ids[start:], depth in [0, 1] of its fact.
    """

    prefix: np.ndarray
    questions: list
    kind: str


def haystack(rng, arrays, L, kind):
    """[L] tokens: one to four stretches of `kind`, or of both where it is "mixed"."""
    stretches, left = [], L
    for n in range(int(rng.integers(1, 5)), 0, -1):
        ids = arrays[kind if kind != "mixed" else KINDS[rng.integers(2)]]
        size = left if n == 1 else int(left * rng.uniform(0.2, 0.6))
        start = int(rng.integers(len(ids)))
        stretches.append(np.take(ids, np.arange(start, start + size), mode="wrap"))
        left -= size
    return np.concatenate(stretches)


def train_sequence(text, L, *, seed, number):
    """The Sequence of this number, of exactly L tokens."""
    rng = np.random.default_rng((seed, number, L))
    words = text.train_words
    chat, place = rng.random() < CHAT, int(rng.choice(3, p=PLACES))
    most = min(MOST_FACTS, L // TOKENS_PER_FACT)
    told = facts(rng, words, int(rng.integers(max(most // 4, 1), most + 1)))
    if rng.random() < BARE:
        told.append(bare(rng, words))
    # (depth, order, ids, tokens of the answer)
    inserts, room = [], L
    for fact in told:
        # at least as much text as facts
        if room < L // 2:
            break
        depth = rng.random()
        said = text.encode("\n" + say(rng, fact) + "\n")
        inserts.append((depth, 0.0, said, 0))
        asked = ask(rng, fact, chat=chat)
        at = (1.0, rng.uniform(max(depth, 0.9), 1.0), rng.uniform(depth, 1.0))[place]
        before, answer = text.encode("\n" + asked.text), text.encode(asked.answer)
        after = text.encode("<|im_end|>\n" if chat else "\n")
        whole = before + answer + after
        inserts.append((at, rng.random() + 1, whole, (len(before), len(answer))))
        room -= len(said) + len(whole)
    hay = haystack(rng, text.train, room, ("code", "prose", "mixed")[rng.integers(3)])
    return _compose(text, hay, inserts)


def _compose(text, hay, inserts):
    """Put each insert at the line's end that follows its depth."""
    ends = np.flatnonzero(text.ends_line[hay]) + 1
    ends = np.append(ends[ends < len(hay)], len(hay))
    parts, plain, answers, done, length = [], [], [], 0, 0
    for depth, _, ids, answer in sorted(inserts, key=lambda insert: insert[:2]):
        wanted = int(depth * len(hay))
        at = int(ends[np.searchsorted(ends, wanted)]) if depth < 1 else len(hay)
        parts += [hay[done:at], np.array(ids)]
        plain += [np.ones(at - done, bool), np.zeros(len(ids), bool)]
        length += at - done
        if answer:
            answers.append((length + answer[0], length + sum(answer)))
        length += len(ids)
        done = at
    parts.append(hay[done:])
    plain.append(np.ones(len(hay) - done, bool))
    return Sequence(np.concatenate(parts), answers, np.concatenate(plain))


def probe(text, L, *, depths, kind, seed, held_out=False):
    """A Probe of as many facts as depths, each asked for, in held-out text.

    Args:
        text: The Text.
        L: Tokens of the prefix and the longest question together.
        depths: Of the facts, in [0, 1).
        kind: "code" or "prose".
        seed: Of everything; integers, a tuple of them too.
        held_out: Whether the wordings are those that training does not use; the words never are.
    """
    rng = np.random.default_rng(seed)
    told = facts(rng, text.held_out_words, len(depths))
    rng.shuffle(told)
    inserts, questions = [], []
    for depth, fact in zip(depths, told, strict=True):
        inserts.append(
            (depth, 0.0, text.encode("\n" + say(rng, fact, held_out=held_out) + "\n"), 0)
        )
        asked = ask(rng, fact, held_out=held_out)
        before, answer = text.encode("\n" + asked.text), text.encode(asked.answer)
        questions.append((np.array(before + answer), len(before), float(depth)))
    longest = max(len(ids) for ids, _, _ in questions)
    room = L - longest - sum(len(insert[2]) for insert in inserts)
    hay = haystack(rng, text.held_out, room, kind)
    return Probe(_compose(text, hay, inserts).ids, questions, kind)
