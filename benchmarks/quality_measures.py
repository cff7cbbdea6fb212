"""What a selection kept, and how far its next-token distributions are from dense."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from crisp_flex.demo.measure import kl, top1_agreement

POSITIONS = 1024
# Query blocks of each layer whose exact mass is computed.
SAMPLED = 8


def kept_map(block_mask):
    """[B, H, Nq, Nkv] bool of a BlockMask: blocks in its partial or full list."""
    counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
    Nkv = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    # one column more: what stands beyond a list's length is undefined
    kept = torch.zeros(*counts.shape, Nkv + 1, dtype=torch.bool, device=counts.device)
    lists = [(counts, indices)]
    if block_mask.full_kv_num_blocks is not None:
        lists.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices))
    for count, blocks in lists:
        listed = torch.arange(blocks.shape[-1], device=blocks.device) < count[..., None]
        kept.scatter_(-1, blocks.long().where(listed, Nkv), True)
    return kept[..., :Nkv]


def mass_recall(query, key, kept, scale, block_size):
    """[H, sampled] fp32: softmax mass in the kept blocks, mean over the rows of a query block.

    Args:
        query: [Hq, L, D].
        key: [Hkv, L, D].
        kept: [Hq, Nq, Nkv] bool.
        scale: Factor on the logits.
        block_size: (query, key) tokens per block.
    """
    (Hq, L, _), (bq, bkv), Nq = query.shape, block_size, kept.shape[1]
    G = Hq // key.shape[0]
    chosen = sorted({round((i + 1) * (Nq - 1) / SAMPLED) for i in range(SAMPLED)})
    out = []
    for block in chosen:
        first, end = block * bq, min((block + 1) * bq, L)
        rows = query[:, first:end].float()
        keys = key[:, :end].float().repeat_interleave(G, 0)
        logits = rows @ keys.mT * scale
        at = torch.arange(end, device=query.device)
        p = logits.masked_fill(at > at[first:, None], float("-inf")).softmax(-1)
        of_key = kept[:, block].repeat_interleave(bkv, -1)[:, :end]
        out.append((p * of_key[:, None]).sum(-1).mean(-1))
    return torch.stack(out, -1)


@dataclass
class Kept:
    """Sums over the selected layers of one prompt step; one entry a layer."""

    layers: list = field(default_factory=list)
    kept: list = field(default_factory=list)
    kept_no_last: list = field(default_factory=list)
    visible: list = field(default_factory=list)
    visible_no_last: list = field(default_factory=list)
    recall: list = field(default_factory=list)

    def add(self, layer, query, key, block_mask, scale, *, recall):
        """Note the selection of one layer; query [1, Hq, L, D], key [1, Hkv, L, D]."""
        L, (bq, bkv) = query.shape[2], block_mask.BLOCK_SIZE
        kept = kept_map(block_mask)[0].expand(query.shape[1], -1, -1)
        blocks = torch.arange(1, kept.shape[1] + 1) * bq
        visible = (blocks.clamp(max=L) + bkv - 1) // bkv
        self.layers.append(layer)
        per_row = kept.sum(-1)
        self.kept.append(per_row.sum(-1))
        self.kept_no_last.append(per_row[:, :-1].sum(-1))
        self.visible.append(int(visible.sum()))
        self.visible_no_last.append(int(visible[:-1].sum()))
        if recall:
            self.recall.append(mass_recall(query[0], key[0], kept, scale, (bq, bkv)))

    def row(self):
        """Densities and recalls as plain numbers; by_layer_head is [layers][heads]."""
        kept = torch.stack(self.kept).double().cpu()
        no_last = torch.stack(self.kept_no_last).double().cpu()
        heads = kept.shape[1]
        visible = torch.tensor(self.visible).double()[:, None]
        facts = {
            "density": float(kept.sum() / (visible.sum() * heads)),
            "density_without_last_block": float(
                no_last.sum() / max(sum(self.visible_no_last) * heads, 1)
            ),
            "layers": self.layers,
            "density_by_layer_head": (kept / visible).tolist(),
        }
        if self.recall:
            recall = torch.stack(self.recall).double().cpu()
            by_head = recall.mean(-1)
            facts |= {
                "recall": float(recall.mean()),
                "recall_p10": float(recall.flatten().quantile(0.1)),
                "recall_min_head": float(by_head.min()),
                "recall_by_layer": by_head.mean(-1).tolist(),
                "recall_min_head_by_layer": by_head.amin(-1).tolist(),
            }
        return facts


def compare(dense, sparse, targets):
    """KL(dense || sparse), top-1 agreement and loss difference of logits [positions, V].

    targets: [positions - 1] the tokens that really come next.
    """
    losses = [float(F.cross_entropy(x[:-1].float(), targets)) for x in (dense, sparse)]
    return {
        "kl": kl(dense, sparse), "top1": top1_agreement(dense, sparse), "loss_dense": losses[0],
        "loss_difference": losses[1] - losses[0], "positions": dense.shape[0],
    }  # fmt: skip
