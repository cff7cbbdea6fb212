"""Token arrays of ordinary text to hide needles in: code and prose to train on, and held out.

    python benchmarks/long_context_text.py --model smol.gguf [--out .carry/long_context_text.npz]

Training code is the standard library's sources, training prose the language reference's smaller
chapters and the docstrings of those sources. Held out are the modules and chapters of the demo's
prompt (crisp_flex.demo.prompt), which benchmarks/quality.py measures on. The file also has the
words that needles are made of, those of training and held-out ones, and the tokenizer, so that the
machine that trains need not tokenise. SmolLM2's 49152 tokens fit uint16: 3 MB.
"""

import argparse
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from crisp_flex.demo.errors import DemoError
from crisp_flex.demo.prompt import MODULES, TOPICS, _docstrings, text_ids

DEFAULT = Path(".carry/long_context_text.npz")
# Tests, and tables of numbers, read like neither code nor prose.
SKIP = {"test", "tests", "idle_test", "site-packages", "pydoc_data", "encodings", "__pycache__"}
HELD_OUT_TOKENS = 131072
# A word for needles: lower case, and this often in the training text.
WORD = re.compile(r"\b[a-z]{4,9}\b")
LEAST_COUNT = 3
KINDS = ("code", "prose")


@dataclass(frozen=True)
class Text:
    """What sequences are made of; train and held_out: {"code", "prose"} -> [tokens] int64."""

    train: dict
    held_out: dict
    train_words: list
    held_out_words: list
    tokenizer: object
    # [vocabulary] bool: the token ends a line
    ends_line: np.ndarray

    def encode(self, text):
        """Token ids of text, without special tokens added; special tokens in it are read."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def sources():
    """Training sources in the order of their paths."""
    folder = Path(sysconfig.get_path("stdlib"))
    for file in sorted(folder.rglob("*.py")):
        inside = file.relative_to(folder)
        if not SKIP & set(inside.parts) and str(inside.with_suffix("")) not in MODULES:
            yield file.read_text(encoding="utf-8", errors="replace")


def prose(codes):
    """Training prose: chapters that are not held out, then the docstrings of the sources."""
    from pydoc_data.topics import topics

    yield from (text for name, text in sorted(topics.items()) if name not in TOPICS)
    for source in codes:
        text = "\n\n".join(_docstrings(source))
        if len(text) > 400:
            yield text


def words_of(pieces):
    """(train, held out) words, sorted: every tenth is held out."""
    counts = Counter(word for piece in pieces for word in WORD.findall(piece))
    words = sorted(word for word, n in counts.items() if n >= LEAST_COUNT)
    return [w for i, w in enumerate(words) if i % 10], words[::10]


def held_out(tokenizer, kind):
    """At most HELD_OUT_TOKENS of the demo's text."""
    length = HELD_OUT_TOKENS
    while True:
        try:
            return text_ids(tokenizer, kind, length)
        except DemoError:
            length = length * 7 // 8


def build(tokenizer, out, *, most_tokens=None):
    """Tokenise everything and write `out`.

    Args:
        tokenizer: A fast Transformers tokenizer with at most 65536 tokens.
        out: Path of the .npz file.
        most_tokens: Per kind of training text; None is all.
    """
    codes = list(sources())
    pieces = {"code": codes, "prose": list(prose(codes))}
    arrays = {}
    for kind in KINDS:
        ids = []
        for piece in pieces[kind]:
            ids += tokenizer.encode(piece.strip() + "\n\n", add_special_tokens=False)
            if most_tokens and len(ids) >= most_tokens:
                break
        arrays[f"train_{kind}"] = np.array(ids[:most_tokens], np.uint16)
        arrays[f"held_out_{kind}"] = np.array(held_out(tokenizer, kind)[:most_tokens], np.uint16)
    arrays["train_words"], arrays["held_out_words"] = map(np.array, words_of(pieces["prose"]))
    backend = tokenizer.backend_tokenizer
    arrays["tokenizer"] = np.array(backend.to_str())
    every = [[token] for token in range(backend.get_vocab_size())]
    shown = backend.decode_batch(every, skip_special_tokens=False)
    arrays["ends_line"] = np.array([text.endswith("\n") for text in shown])
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, **arrays)


def read(path):
    """The Text of a file written by `build`."""
    from tokenizers import Tokenizer

    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    return Text(
        train={kind: arrays[f"train_{kind}"].astype(np.int64) for kind in KINDS},
        held_out={kind: arrays[f"held_out_{kind}"].astype(np.int64) for kind in KINDS},
        train_words=arrays["train_words"].tolist(),
        held_out_words=arrays["held_out_words"].tolist(),
        tokenizer=Tokenizer.from_str(str(arrays["tokenizer"])),
        ends_line=arrays["ends_line"],
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, help="SmolLM2's .gguf file, or its folder")
    parser.add_argument("--out", type=Path, default=DEFAULT)
    args = parser.parse_args()
    import transformers

    path = Path(args.model)
    where = (str(path), {}) if path.is_dir() else (str(path.parent), {"gguf_file": path.name})
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(where[0], **where[1])
    build(tokenizer, args.out)
    text = read(args.out)
    for name in ("train", "held_out"):
        sizes = {kind: len(ids) for kind, ids in getattr(text, name).items()}
        print(f"{name}: {sizes} tokens, {len(getattr(text, name + '_words'))} words")
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
