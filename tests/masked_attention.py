"""An attention that knows nothing of our kernels: block lists become an element mask."""

import torch


def kept_blocks(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, Nkv):
    """[B, Hq, Nq, Nkv] bool from FlexAttention's lists."""
    return listed(kv_num_blocks, kv_indices, Nkv) | listed(full_kv_num_blocks, full_kv_indices, Nkv)


def listed(counts, indices, Nkv):
    """[B, Hq, Nq, Nkv] bool: the blocks that one list names; entries past the count are ignored."""
    keep = torch.zeros(*counts.shape, Nkv + 1, dtype=torch.bool, device=counts.device)
    slots = torch.arange(indices.shape[-1], device=counts.device)
    # what lies past the count goes to a column of its own, which is cut off
    at = torch.where(slots < counts[..., None], indices.long(), Nkv)
    return keep.scatter_(-1, at, True)[..., :Nkv]


def masked_attention(q, k, v, keep, block_size=(128, 128), key_valid=None, scale=None):
    """softmax(q k^T) v in fp32 over causal, valid pairs of kept blocks, one query block at a time.

    Rows that see nothing give 0.
    """
    B, Hq, Lq, D = q.shape
    Hkv, Lkv = k.shape[1:3]
    block_q, block_kv = block_size
    scale = D**-0.5 if scale is None else scale
    k, v = (x.float().repeat_interleave(Hq // Hkv, 1) for x in (k, v))
    positions = torch.arange(Lkv, device=q.device)
    out = torch.empty(B, Hq, Lq, v.shape[3], device=q.device)
    for row in range(keep.shape[2]):
        queries = torch.arange(row * block_q, min(Lq, (row + 1) * block_q), device=q.device)
        visible = positions <= queries[:, None] + (Lkv - Lq)
        visible = visible & keep[:, :, row].repeat_interleave(block_kv, -1)[:, :, None, :Lkv]
        if key_valid is not None:
            visible = visible & key_valid[:, None, None, :]
        logits = (q[:, :, queries].float() @ k.transpose(-1, -2)) * scale
        weights = logits.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)
        out[:, :, queries] = weights @ v
    return out


def relative_error(got, want):
    """|| got - want || / || want ||, NaN if anything is."""
    return ((got.float() - want.float()).norm() / want.float().norm()).item()
