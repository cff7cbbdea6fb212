"""Selections by name: a preset, a policy of CrispConfig with fields, or a function of the user's.

balanced                                    a preset of "hybrid"
hybrid:coverage=.9,block_size=128x64        any field of CrispConfig
select=trials.mine:keep                     keep(q, k, v, layer) -> BlockMask
"""

import dataclasses
import importlib
from collections.abc import Callable

from crisp_flex import ConfigError, CrispConfig
from crisp_flex.config import POLICIES, PRESETS

PRESETS_SHOWN = tuple(PRESETS)
ALPHAS = ("crisp:alpha=.75", "crisp:alpha=1", "crisp:alpha=1.25", "crisp:alpha=1.5")
ROUTERS = ("crisp:router=jsd", "crisp:router=vs", "crisp:router=pe")
BASELINES = (
    "flexprefill:gamma=.9", "flexprefill:gamma=.95", "minference", "xattention", "streaming",
    "oracle:coverage=.9", "oracle:coverage=.95",
)  # fmt: skip
ALL = (*PRESETS_SHOWN, *ALPHAS, *ROUTERS, *BASELINES)
# SmolLM2 at 2048 tokens on the CPU: 18 to 20 s of one core a sparse pass, 13 s a dense one, so that
# the 12 rows of --quick (8 passes for text, 8 prompts answered) take about five minutes of one core
QUICK = ("balanced", "crisp:alpha=1", "flexprefill:gamma=.95")


@dataclasses.dataclass(frozen=True)
class Selection:
    """A name with either a config or a function select(q, k, v, layer) -> BlockMask."""

    name: str
    config: CrispConfig | None = None
    select: Callable | None = None


def parse(text, *, dense_last_blocks):
    """The Selection that `text` spells.

    Policies other than hybrid get max_uncovered=1 unless the text sets it, so that a baseline is
    measured as published and not as our guard repairs it.

    Args:
        text: As in the module's text.
        dense_last_blocks: For configs whose text does not set it.

    Raises:
        ConfigError: The policy, a field or a value does not exist.
    """
    if text.startswith("select="):
        module, _, name = text.removeprefix("select=").partition(":")
        if not name:
            raise ConfigError(f"{text!r}: write select=MODULE:FUNCTION")
        return Selection(text, select=getattr(importlib.import_module(module), name))
    head, _, fields = text.partition(":")
    options = {"dense_last_blocks": dense_last_blocks}
    if head in PRESETS:
        options["preset"] = head
    elif head in POLICIES:
        options["policy"] = head
        if head != "hybrid":
            options["max_uncovered"] = 1.0
    else:
        raise ConfigError(f"no policy {head!r}; choose from {sorted({*POLICIES, *PRESETS})}")
    for pair in filter(None, fields.split(",")):
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"{text!r}: write FIELD=VALUE, got {pair!r}")
        options[name] = _value(value)
    return Selection(text, config=CrispConfig.from_options(options))


def _value(text):
    if "x" in text and text.replace("x", "").isdigit():
        return tuple(int(part) for part in text.split("x"))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
