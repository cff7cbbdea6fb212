"""Mask programs through the passes: a rewrite never changes the result, a refusal is always right.

Under policy "dense" the lists and the mask_mod of a rewritten call must let through exactly the
pairs that the program's own mask does, element by element.
"""

import torch
from hypothesis import event
from torch import fx

from crisp_flex import CrispConfig, torch_internals
from crisp_flex.passes.pipeline import run_passes
from tests.fuzz.programs import SDPA
from tests.masked_attention import listed

CONFIG = CrispConfig(min_seqlen=16, block_size=(16, 16), policy="dense")


class PairsOfFlex(fx.Interpreter):
    """Runs a rewritten graph; flex_attention gives softmax in float64 over the pairs it may see."""

    pairs = None

    def call_function(self, target, args, kwargs):
        if target is not torch_internals.FLEX_ATTENTION:
            return super().call_function(target, args, kwargs)
        query, key, value, _, block_mask, scale, _, _, captured = args
        named = dict(zip(torch_internals.block_mask_fields(), block_mask, strict=True))
        self.pairs = visible_pairs(query, key, named, captured)
        return (attend(query, key, value, self.pairs, scale),)


def visible_pairs(query, key, named, captured):
    """[B, Hq, Lq, Lkv] bool: listed as full, or listed as partial and let through by mask_mod."""
    B, Hq, Lq, _ = query.shape
    Lkv = key.shape[2]
    bq, bkv = named["block_q"], named["block_kv"]
    Nkv = -(-Lkv // bkv)

    def elements(counts, indices):
        blocks = listed(named[counts], named[indices], Nkv)
        wide = blocks.repeat_interleave(bq, 2).repeat_interleave(bkv, 3)
        return wide[:, :, :Lq, :Lkv].expand(B, Hq, -1, -1)

    b, h, q, k = torch.meshgrid(*(torch.arange(n) for n in (B, Hq, Lq, Lkv)), indexing="ij")
    allowed = named["mask_mod"](b, h, q, k, *captured)
    partial = elements("kv_num_blocks", "kv_indices")
    full = elements("full_kv_num_blocks", "full_kv_indices")
    assert not (partial & full).any(), "a block is in both lists"
    return full | (partial & allowed)


def attend(query, key, value, pairs, scale):
    """softmax(q k^T) v in float64 over pairs; rows that see nothing give 0."""
    G = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(G, 1) for x in (key, value))
    logits = (query.double() @ key.mT) * scale
    weights = logits.masked_fill(~pairs, float("-inf")).softmax(-1).nan_to_num(0.0)
    return (weights @ value).to(query.dtype)


def check(program):
    """Assert that run_passes keeps the meaning of a program; whether it was rewritten."""
    gm, _ = program.graph()
    nodes = list(gm.graph.nodes)
    try:
        (site,) = run_passes(gm, CONFIG, share_regions=False).sites
        if site.rejection is not None:
            event(f"refused: {site.rejection.reason.name}")
            assert list(gm.graph.nodes) == nodes, "a refused call was changed"
            return False
        event(f"rewritten: {site.mask.split()[0]}")
        runner = PairsOfFlex(gm)
        (got,) = runner.run(*program.fresh_inputs())
        compare(program, got, runner.pairs)
    except Exception as error:
        error.add_note(str(program.graph()[0].graph))
        error.add_note(str(gm.graph))
        raise
    return True


def check_traced(program, *, dynamic):
    """The same through Dynamo, with symbolic lengths if dynamic; whether it was rewritten."""
    found = []

    def backend(gm, example_inputs):
        (site,) = run_passes(gm, CONFIG, share_regions=False).sites
        runner = PairsOfFlex(gm)
        found.append((site, runner))
        return runner.run

    torch._dynamo.reset()
    compiled = torch.compile(program.function(), backend=backend, dynamic=dynamic, fullgraph=True)
    try:
        with torch.no_grad():
            got, _ = compiled(*program.fresh_inputs())
        ((site, runner),) = found
        if site.rejection is None:
            compare(program, got, runner.pairs)
    except Exception as error:
        error.add_note(str(program.graph()[0].graph))
        raise
    return site.rejection is None


def check_symbolic(program, shorter):
    """Lengths that are symbols: traced once, run at two lengths; whether both were rewritten.

    A graph that its own guards send away is followed by another, which is looked at alike.
    """
    found = []

    def backend(gm, example_inputs):
        (site,) = run_passes(gm, CONFIG, share_regions=False).sites
        runner = PairsOfFlex(gm)
        found.append((site, runner))
        return runner.run

    torch._dynamo.reset()
    function, ran = program.function(sized=True), 0
    compiled = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)
    for inputs in (program.fresh_inputs(), program.shorter_inputs(shorter)):
        for _, runner in found:
            runner.pairs = None
        want, mask = function(*(x.clone() for x in inputs))
        try:
            # the program's own numbers stay numbers: only lengths are to be symbols
            with torch.no_grad(), torch._dynamo.config.patch(specialize_int=True):
                got, _ = compiled(*inputs)
            used = [runner.pairs for _, runner in found if runner.pairs is not None]
            if used:
                compare_results(got, want, used[0], mask)
        except Exception as error:
            error.add_note(str(program.graph()[0].graph))
            raise
        ran += len(used)
    if ran == 2:
        event(f"both lengths in {len(found)} graphs")
    return ran == 2


def compare(program, got, pairs):
    """Results and pairs of a rewritten call against the program's own."""
    mask = program.value(program.result)
    compare_results(got, SDPA(*program.given[:3], attn_mask=mask), pairs, mask)


def compare_results(got, want, pairs, mask):
    """A result and its pairs against the result and the mask of the program, run as it is."""
    if mask.dtype != torch.bool:
        assert ((mask == 0) | (mask <= torch.finfo(torch.float32).min)).all(), "a bias was dropped"
        mask = mask == 0
    # keys that no query sees may be cut off
    if mask.shape[-1] > 1:
        pairs = torch.nn.functional.pad(pairs, (0, mask.shape[-1] - pairs.shape[3]))
    wrong = (pairs != mask).nonzero()
    assert wrong.numel() == 0, f"pairs differ, the first at (b, h, q, k) = {wrong[0].tolist()}"
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
