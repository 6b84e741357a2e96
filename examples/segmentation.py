"""Segmentation: a small U-Net learns to find shapes in noise, under bfloat16 autocast.

One learns that a converted model trains under torch.autocast without further changes: weights stay float32, and the
transposed convolutions compute in bfloat16 as torch's do. The images are made on the fly: a disc, a square and a
diamond of random place, size and brightness under noise; later shapes cover earlier ones.

Expect a mean IoU of about 0.9 on new images after a minute on two cores, and a training step about as fast as with
torch's layers, since the convolutions take most of it, and on a CPU in bfloat16 some layers stay torch's own.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

import gemmconv
from common import algorithms, check_same, parser, plt, progress, save, show, times_by_turns, verdict

CLASSES = "background", "disc", "square", "diamond"


def block(before: int, after: int) -> nn.Sequential:
    """Two convolutions that keep height and width: [N, before, H, W] -> [N, after, H, W]."""
    layers: list[nn.Module] = []
    for size in (before, after):
        layers += [nn.Conv2d(size, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Ronneberger et al. 2015 with two levels: [N, 1, H, W] -> logits [N, 4, H, W]; H and W are multiples of 4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = width, 2 * width
        self.down = nn.ModuleList([block(1, sizes[0]), block(*sizes)])
        self.middle = block(sizes[1], 2 * sizes[1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, 2) for size in sizes[::-1])
        self.join = nn.ModuleList(block(2 * size, size) for size in sizes[::-1])
        self.last = nn.Conv2d(width, len(CLASSES), 1)

    def forward(self, images: Tensor) -> Tensor:
        skipped = []
        for down in self.down:
            images = down(images)
            skipped.append(images)
            images = functional.max_pool2d(images, 2)
        images = self.middle(images)
        for up, join in zip(self.up, self.join, strict=True):
            images = join(torch.cat((up(images), skipped.pop()), 1))
        return self.last(images)


def shapes(count: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make images [count, 1, size, size] and the class of each of their pixels [count, size, size]."""
    y, x = torch.meshgrid(*2 * [torch.linspace(0, 1, size, device=device)], indexing="ij")
    images, classes = torch.zeros(count, size, size, device=device), torch.zeros(count, size, size, device=device)
    for number in range(1, len(CLASSES)):
        random = torch.rand(4, count, 1, 1, device=device)
        dx, dy = (x - 0.15 - 0.7 * random[0]).abs(), (y - 0.15 - 0.7 * random[1]).abs()
        distance = (torch.hypot(dx, dy), torch.maximum(dx, dy), dx + dy)[number - 1]
        inside = distance < 0.12 + 0.13 * random[2]
        images = torch.where(inside, 0.4 + 0.6 * random[3], images)
        classes = torch.where(inside, number, classes)
    return (images + 0.2 * torch.randn_like(images))[:, None], classes.long()


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="of autocast; auto is bfloat16, but float32 on CPUs that need over 3 times as long in bfloat16",
    )
    flags.add_argument("--steps", type=int, default=400, help="training steps")
    flags.add_argument("--batch", type=int, default=16, help="images of a step")
    flags.add_argument("--size", type=int, default=64, help="height and width in pixels, a multiple of 4")
    flags.add_argument("--width", type=int, default=16, help="channels of the U-Net's first level")
    options = flags.parse_args()
    device, batch = options.device, (options.batch, options.size, options.device)
    torch.manual_seed(0)

    def autocast(dtype: torch.dtype) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16)

    def loss_of(network: nn.Module, images: Tensor, classes: Tensor, dtype: torch.dtype) -> Tensor:
        with autocast(dtype):
            return functional.cross_entropy(network(images), classes)  # computed in float32, as autocast wants

    model = gemmconv.convert(UNet(options.width).to(device))
    dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
    if options.dtype == "auto" and device.type == "cpu":
        tries = [partial(loss_of, model, *shapes(*batch), one) for one in (torch.bfloat16, torch.float32)]
        bfloat16_ms, float32_ms = times_by_turns(tries, device, rounds=1)
        if bfloat16_ms > 3 * float32_ms:
            dtype = torch.float32
            print(f"float32 is used: a forward pass in bfloat16 takes {bfloat16_ms:.0f} ms, not {float32_ms:.0f} ms")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=options.steps)
    losses: list[float] = []
    for _ in progress(options.steps, "training", losses):
        optimizer.zero_grad()
        loss = loss_of(model, *shapes(*batch), dtype)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())

    images, classes = shapes(64, options.size, device)
    with_torch = UNet(options.width).to(device)
    with_torch.load_state_dict(model.state_dict())
    with torch.no_grad(), autocast(dtype):
        logits = model.eval()(images).float()
        difference = check_same(logits, with_torch.eval()(images), 5e-2)  # a few roundings to bfloat16's 8 bits
    found = logits.argmax(1)
    iou = [
        ((found == k) & (classes == k)).sum().item() / max(1, ((found == k) | (classes == k)).sum().item())
        for k in range(len(CLASSES))
    ]

    layout = {"figsize": (13, 7.5), "width_ratios": (2, 1, 1, 1), "layout": "constrained"}
    figure, axes = plt.subplot_mosaic("Labc;Ldef;Lghi", **layout)
    axes["L"].semilogy(losses)
    axes["L"].set(title="training loss (cross-entropy)", xlabel="step")
    axes["L"].grid(alpha=0.3)
    colours = {"vmin": 0, "vmax": len(CLASSES) - 1, "interpolation": "nearest"}
    for row, names in enumerate(("abc", "def", "ghi")):
        show(axes[names[0]], images[row, 0], "" if row else "input", cmap="gray", interpolation="nearest")
        show(axes[names[1]], classes[row], "" if row else "truth", **colours)
        show(axes[names[2]], found[row], "" if row else "prediction", **colours)
    save(figure, options.out / "segmentation.png")

    print(f"training loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
    print("IoU on 64 new images: " + ", ".join(f"{name} {one:.3f}" for name, one in zip(CLASSES, iou, strict=True)))
    print(f"mean IoU {sum(iou) / len(iou):.3f}; largest difference from torch's logits {difference:.1e} of the largest")
    networks, data = (with_torch.train(), model.train()), shapes(*batch)
    with autocast(dtype):
        print(algorithms(model, images[: options.batch], dtype=dtype))
    ms = times_by_turns([lambda n=network: loss_of(n, *data, dtype).backward() for network in networks], device)
    print(
        verdict(
            f"forward and backward of {options.batch} images in {str(dtype).removeprefix('torch.')} on {device.type}",
            *ms,
        )
    )


if __name__ == "__main__":
    main()
