"""Tensor parallel under torchrun: each rank's heads are sparse, the logits equal one process's.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py                    # NCCL, two GPUs
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --device cpu       # gloo, no Inductor

A random Llama is saved, loaded by every rank with transformers' `tp_plan="auto"`, compiled, and its
prompt compared with the unsharded model's. Policy dense: the two differ by rounding. On the CPU the
graphs run as rewritten. Prints a line a rank; ends with status 1 where a rank is not sparse or off.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import crisp_flex
from crisp_flex import CrispConfig, torch_internals
from crisp_flex.routing import ops

LAYERS = {"cuda": 2, "cpu": 1}


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--length", type=int, default=None, help="tokens of the prompt")
    return parser.parse_args()


def save_model(path, wide):
    """A random Llama on disk: 8 query heads, 4 key heads."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=1024 if wide else 64,
        intermediate_size=1024 if wide else 64,
        num_hidden_layers=LAYERS["cuda" if wide else "cpu"],
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128 if wide else 16,
        vocab_size=128,
        max_position_embeddings=65536,
        initializer_range=0.05,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)


def main():
    args = parse()
    rank, on_gpu = int(os.environ["RANK"]), args.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch_internals.compile_with_inductor = lambda gm, *_: gm.forward
    dist.init_process_group("nccl" if on_gpu else "gloo")
    shared = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(shared, device=device)
    if rank == 0:
        save_model(shared[0], on_gpu)
    dist.barrier()
    failed = run(Path(shared[0]), device, args.length or (16384 if on_gpu else 48), rank)
    dist.destroy_process_group()
    raise SystemExit(int(failed))


@torch.no_grad()
def run(path, device, length, rank):
    """Whether this rank is dense, or further from the unsharded model than rounding."""
    import transformers

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    load = transformers.LlamaForCausalLM.from_pretrained
    ids = torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(1)).to(device)
    want = load(path, dtype=dtype).to(device).eval()(ids, use_cache=False).logits
    model = load(path, dtype=dtype, tp_plan="auto").eval()
    blocks = (128, 128) if device.type == "cuda" else (16, 16)
    config = CrispConfig(min_seqlen=32, block_size=blocks, policy="dense")
    crisp_flex.compile(model, config)
    heads = []
    with ops.observe(lambda index, counts, *_: heads.append(counts.shape[1])):
        got = model(ids, use_cache=False).logits
    if hasattr(got, "full_tensor"):
        got = got.full_tensor()
    error = ((got - want).float().norm() / want.float().norm()).item()
    rewritten = sum(len(report.rewritten) for report in crisp_flex.reports(model))
    print(
        f"rank {rank}: {rewritten} of {LAYERS[device.type]} calls sparse, heads a route {heads}, ",
        end="",
    )
    print(f"relative error {error:.1e}", flush=True)
    local, layers = 8 // dist.get_world_size(), LAYERS[device.type]
    limit = 3e-2 if device.type == "cuda" else 1e-5
    return rewritten != layers or heads != [local] * layers or not error < limit


if __name__ == "__main__":
    main()
