"""Disjoint windows of real text: code and prose of Python's standard library."""

from crisp_flex.demo.errors import DemoError
from crisp_flex.demo.prompt import text_ids

KINDS = ("code", "prose")


def windows(tokenizer, kind, length, count):
    """Up to `count` disjoint lists of `length` token ids, fewer where the text ends before.

    Raises:
        DemoError: There is not even one.
    """
    for n in range(count, 0, -1):
        try:
            ids = text_ids(tokenizer, kind, n * length)
        except DemoError:
            if n == 1:
                raise
            continue
        return [ids[i * length : (i + 1) * length] for i in range(n)]
    return []
