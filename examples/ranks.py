"""Several GPUs share one model: a process each, started by torchrun.

    torchrun --nproc-per-node 2 examples/ranks.py --device cpu    # two processes, gloo
    torchrun --nproc-per-node 4 examples/ranks.py                 # four GPUs, NCCL
    torchrun --nproc-per-node 2 examples/ranks.py --plain         # DistributedDataParallel

Each has its rows of every parameter, gradient and state, and gathers a layer when it computes with
it. The losses are those of DistributedDataParallel. Needs `transformers`
(`pip install -e '.[examples]'`).
"""

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from example_parts import Rows, language_model, parse
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from megacompile import megacompile


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; gives the mean over ranks of each step's loss."""
    flags = parse(__doc__, argv)
    device = torch.device(flags.device, int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    model = language_model()
    if flags.plain:
        model = DistributedDataParallel(model.to(device))
    else:
        model = megacompile(model, mesh=mesh, device=device)  # instead of the line above

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = Rows()
    data = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, shuffle=False))
    losses = []
    for _, batch in zip(range(flags.steps), data, strict=False):
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / mesh.size())
        if dist.get_rank() == 0:
            print(f"step {len(losses)}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # out here: DistributedDataParallel holds the group while it lives
