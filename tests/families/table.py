"""docs/families.md: written by `python -m tests.families.table`, read by the tests."""

import re
import sys
import warnings
from pathlib import Path

import torch

PATH = Path(__file__).parents[2] / "docs" / "families.md"

_ERROR = re.compile(r"relative difference is ([\d.e+-]+\d)")

_HEAD = """# What crisp_flex does with which model and call

Written by `python -m tests.families.table [FAMILY ...]` (transformers {transformers}, torch
{torch}): a tiny random model of each family with two attention layers, a prompt of 96 tokens,
`min_seqlen=32`, windows of 24 tokens, static shapes. "2 sparse": both calls are routed. "window":
all blocks of the sliding window are kept, which is exact; "segments": all of the chunk (of 32
positions) are. "dense": the call stays as it was, with
its Reason. In every cell the logits of the rows that people read equal those of the model alone
(policy `dense`; the largest relative difference is {error:.0e}).

- A *chunk* is the next 64 tokens behind 64 in a DynamicCache, a *second turn* the next 49 behind 83
  with an attention_mask, a *static second turn* the same with a StaticCache.
- Gemma 2 (a soft cap on the logits) and gpt-oss (sinks) refuse SDPA and take
  `attn_implementation="crisp_flex"` (`crisp_flex.huggingface.register()`); they are compared with
  their eager attention. gpt-oss is sparse on CUDA only. Bloom and MPT (ALiBi) write their own
  attention and ask no registry: nothing of them is rewritten.
- Whisper and Bart: the decoder's own attention is routed, encoder and cross
  attention are not causal and stay dense; T5 adds a position bias and stays dense.
- On the CPU a padding mask with dynamic shapes stays dense: Inductor's C++ kernel does not take it.
- A position that only a tensor has (static second turn) is routed by the eager reference on CUDA.

"""


def read():
    """family -> call -> the text of its cell, as committed."""
    rows = [line.strip("| \n").split(" | ") for line in PATH.open() if line.startswith("| ")]
    calls = rows[0][1:]
    return {row[0]: dict(zip(calls, row[1:], strict=True)) for row in rows[1:]}


def write(families=()):
    """Run the cells of the given families, of all if none is given, and write the table.

    The largest error in the text only grows where a part is run.
    """
    import transformers

    from tests.families.cells import run
    from tests.families.models import CALLS, FAMILIES

    lines = ["| family | " + " | ".join(CALLS) + " |", "|" + "---|" * (len(CALLS) + 1)]
    committed = read() if families else {}
    worst = float(_ERROR.search(PATH.read_text())[1]) if families else 0.0
    for family in FAMILIES:
        if families and family not in families:
            lines.append(f"| {family} | " + " | ".join(committed[family].values()) + " |")
            continue
        cells = []
        for call in CALLS:
            torch._dynamo.reset()
            cell = run(family, call)
            worst = max(worst, cell.error)
            cells.append(str(cell))
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
        sys.stderr.write(f"{family}: {cells}\n")
    head = _HEAD.format(transformers=transformers.__version__, torch=torch.__version__, error=worst)
    PATH.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    write(sys.argv[1:])
