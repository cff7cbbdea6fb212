"""The passes over a Dynamo graph, in order: match, lift_mask, unrepeat_kv, eligibility, rewrite."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx

    from crisp_flex.config import CrispConfig
    from crisp_flex.report import RewriteReport

if not __name__.startswith("crisp_flex."):
    raise ImportError(f"import crisp_flex.passes, not {__name__!r}: one module, one name")


def run(gm: fx.GraphModule, config: CrispConfig | None = None) -> RewriteReport:
    """Rewrite in place the attention calls of a graph that torch.compile does not hand over.

    Args:
        gm: `torch.export.export(model, ...).graph_module`, or any graph of torch or ATen calls with
            fake tensors in its metadata. Compile it with Inductor (AOTInductor for an exported
            program): the eager operator ignores the block lists and computes dense attention.
        config: What to route and when; None takes the defaults.

    Returns:
        One SiteReport a call, in order.
    """
    from crisp_flex.config import CrispConfig
    from crisp_flex.passes.pipeline import run_passes

    config = config if config is not None else CrispConfig()
    return run_passes(gm, config, share_regions=False)
