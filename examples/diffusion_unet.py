"""Train a diffusion model: a UNet of diffusers learns the noise that was added to images.

    python examples/diffusion_unet.py            # streamed
    python examples/diffusion_unet.py --plain    # the same losses

Needs `diffusers` (`pip install -e '.[examples]'`).
"""

from collections.abc import Sequence

import torch
from diffusers import DDPMScheduler, UNet2DModel
from example_parts import parse
from torch.nn import functional

from megacompile import megacompile


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; gives the loss of each step."""
    flags = parse(__doc__, argv)
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    model = model.to(flags.device) if flags.plain else megacompile(model, device=flags.device)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = DDPMScheduler(num_train_timesteps=100)
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(flags.steps):
        images = torch.rand(8, 1, 16, 16, generator=draw) * 2 - 1
        noise = torch.randn(images.shape, generator=draw)
        times = torch.randint(0, 100, (8,), generator=draw)  # how noisy each image is
        noisy = schedule.add_noise(images, noise, times)
        predicted = model(noisy.to(flags.device), times.to(flags.device)).sample
        loss = functional.mse_loss(predicted, noise.to(flags.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {len(losses)}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
