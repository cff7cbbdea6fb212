"""Runs the passes over one graph, in order, and reports each site."""

from __future__ import annotations

import logging
from dataclasses import replace

from torch import fx

from crisp_flex import flex_hop
from crisp_flex.config import CrispConfig
from crisp_flex.passes.autocast import cast_inputs
from crisp_flex.passes.dead_nodes import ancestors, erase_dead_ancestors
from crisp_flex.passes.eligibility import check
from crisp_flex.passes.lift_mask import lift_mask
from crisp_flex.passes.mask_spec import MaskSpec
from crisp_flex.passes.match import SdpaSite, find_sdpa_sites
from crisp_flex.passes.node_ops import tensor_of
from crisp_flex.passes.placement import Placement
from crisp_flex.passes.rewrite import Rewriter, Rewritten
from crisp_flex.passes.selection import lacks_kernels
from crisp_flex.passes.sparse_call import fake_tensor
from crisp_flex.passes.unrepeat_kv import unrepeat_kv
from crisp_flex.report import RewriteReport, SiteReport

log = logging.getLogger(__name__)


def run_passes(
    gm: fx.GraphModule, config: CrispConfig, *, share_regions: bool = True, inside: str = ""
) -> RewriteReport:
    """Rewrite in place every attention call of gm that is proved to be causal prefill.

    Args:
        gm: A Dynamo (torch-level) graph with fake tensors in `meta["example_value"]`, or the graph
            of an exported program (`meta["val"]`).
        config: What to route; its overrides are applied per site.
        share_regions: On the CPU, alike calls share one subgraph; AOTInductor takes no subgraphs.
        inside: Path of the module that gm is the graph of, where that is a part of a model.

    Returns:
        One SiteReport a call, in order. A rejected call and all that it needs are unchanged.
    """
    report = RewriteReport()
    masks: dict[fx.Node, MaskSpec] = {}
    dead: set[fx.Node] = set()
    rewriter = Rewriter(gm, share_regions=share_regions)
    for found_site in find_sdpa_sites(gm):
        path = ".".join(part for part in (inside, found_site.module_path) if part)
        site = replace(found_site, module_path=path)
        asked = config.for_site(site.index, site.module_path)
        mask = _read_mask(site, masks)
        key, value, _ = unrepeat_kv(site.key, site.value)
        site, key, value, casts = cast_inputs(site, key, value)
        site_config = _settled(asked, site, value, mask)
        found = check(site, key, value, mask, site_config)
        if isinstance(found, Placement):
            q, k = fake_tensor(site.query), fake_tensor(key)
            found = lacks_kernels(q, k, found, asked, site_config) or found
        rewritten = Rewritten(kernel="", policy="", head_groups=1)
        shapes = _shapes(site, key)
        if isinstance(found, Placement):
            dead |= _left_over(site, key, value)
            rewritten = rewriter.rewrite(site, key, value, found, site_config)
        else:
            for node in casts:
                gm.graph.erase_node(node)
        report.sites.append(
            SiteReport(
                index=site.index,
                node=site.node.name,
                module_path=site.module_path,
                shapes=shapes,
                mask=_mask_text(site, mask),
                kernel=rewritten.kernel,
                policy=rewritten.policy,
                head_groups=rewritten.head_groups,
                last_blocks_apart=rewritten.last_blocks_apart,
                selection=rewritten.selection,
                min_seqlen=site_config.least_tokens,
                max_uncovered=site_config.max_uncovered,
                on_violation=site_config.on_violation,
                rejection=None if isinstance(found, Placement) else found,
            )
        )
        log.info("%s", report.sites[-1])
    if report.rewritten:
        erase_dead_ancestors(gm.graph, dead)
        gm.graph.lint()
        gm.recompile()
    return report


def _read_mask(site: SdpaSite, masks: dict[fx.Node, MaskSpec]) -> MaskSpec | None:
    """The reading of a mask that the graph computes; None for no mask, or an input."""
    node = site.attn_mask
    if node is None or site.nested or node.op in ("placeholder", "get_attr"):
        return None
    if node not in masks:
        masks[node] = lift_mask(node)
    return masks[node]


def _settled(
    config: CrispConfig, site: SdpaSite, value: fx.Node, mask: MaskSpec | None
) -> CrispConfig:
    """config with this GPU's numbers for what it leaves open; all later passes see those."""
    q, v = tensor_of(site.query), tensor_of(value)
    if q is None or v is None:  # refused by check()
        return config
    captures = (mask is not None and mask.may_capture) or not site.is_plain
    return flex_hop.settle(config, q, v, captures=captures)


def _left_over(site: SdpaSite, key: fx.Node, value: fx.Node) -> set[fx.Node]:
    """What only the call may have needed: its mask and the repetition of its heads."""
    nodes = (ancestors(site.key) | {site.key}) - (ancestors(key) | {key})
    nodes |= (ancestors(site.value) | {site.value}) - (ancestors(value) | {value})
    if site.attn_mask is not None:
        nodes |= ancestors(site.attn_mask) | {site.attn_mask}
    return nodes


def _mask_text(site: SdpaSite, mask: MaskSpec | None) -> str:
    if mask is not None:
        return mask.describe()
    if site.attn_mask is None:
        return "causal" if site.is_causal else "none"
    return "not read"


def _shapes(site: SdpaSite, key: fx.Node) -> str:
    q, k = tensor_of(site.query), tensor_of(key)
    if q is None or k is None:
        return "shapes not known"
    dtype = str(q.dtype).removeprefix("torch.")
    return f"q{list(q.shape)} kv{list(k.shape)} {dtype} {q.device}"
