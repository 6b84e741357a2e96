"""Segmentation: a small U-Net learns to find shapes in noise, in images or in volumes, under bfloat16 autocast.

One learns that a converted model trains under torch.autocast without further changes: weights stay float32, and the
transposed convolutions compute in bfloat16 as torch's do. The images are made on the fly: a disc, a square and a
diamond of random place, size and brightness under noise; later shapes cover earlier ones. With ``--axes 3`` they are
volumes of a ball, a cube and an octahedron, and the network is one of Conv3d and ConvTranspose3d.

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
CONVOLUTIONS, UPSAMPLERS = {2: nn.Conv2d, 3: nn.Conv3d}, {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}  # by axes
NORMS, POOLS = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}, {2: functional.max_pool2d, 3: functional.max_pool3d}


def block(before: int, after: int, axes: int) -> nn.Sequential:
    """Two convolutions that keep the size: [N, before, ...] -> [N, after, ...]."""
    layers: list[nn.Module] = []
    for size in (before, after):
        layers += [CONVOLUTIONS[axes](size, after, 3, padding=1, bias=False), NORMS[axes](after), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Ronneberger et al. 2015 with two levels: [N, 1, ...] -> logits [N, 4, ...]; sizes are multiples of 4."""

    def __init__(self, width: int, axes: int) -> None:
        super().__init__()
        sizes = width, 2 * width
        self.pool = POOLS[axes]
        self.down = nn.ModuleList([block(1, sizes[0], axes), block(*sizes, axes)])
        self.middle = block(sizes[1], 2 * sizes[1], axes)
        self.up = nn.ModuleList(UPSAMPLERS[axes](2 * size, size, 2, 2) for size in sizes[::-1])
        self.join = nn.ModuleList(block(2 * size, size, axes) for size in sizes[::-1])
        self.last = CONVOLUTIONS[axes](width, len(CLASSES), 1)

    def forward(self, images: Tensor) -> Tensor:
        skipped = []
        for down in self.down:
            images = down(images)
            skipped.append(images)
            images = self.pool(images, 2)
        images = self.middle(images)
        for up, join in zip(self.up, self.join, strict=True):
            images = join(torch.cat((up(images), skipped.pop()), 1))
        return self.last(images)


def shapes(count: int, size: int, axes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make images [count, 1, size, ...] and the class of each of their pixels [count, size, ...]."""
    places = torch.meshgrid(*axes * [torch.linspace(0, 1, size, device=device)], indexing="ij")
    images, classes = (torch.zeros(count, *axes * [size], device=device) for _ in range(2))
    for number in range(1, len(CLASSES)):
        random = torch.rand(axes + 2, count, *axes * [1], device=device)
        apart = torch.stack([(x - 0.15 - 0.7 * one).abs() for x, one in zip(places, random, strict=False)])
        distance = (apart.norm(dim=0), apart.amax(0), 2 * apart.mean(0))[number - 1]
        inside = distance < 0.12 + 0.13 * random[-2]
        images = torch.where(inside, 0.4 + 0.6 * random[-1], images)
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
    flags.add_argument("--axes", type=int, choices=(2, 3), default=2, help="2 for images, 3 for volumes")
    flags.add_argument("--steps", type=int, default=None, help="training steps (default: 400, of volumes 150)")
    flags.add_argument("--batch", type=int, default=None, help="images of a step (default: 16, of volumes 4)")
    flags.add_argument("--size", type=int, default=None, help="pixels of an axis, a multiple of 4 (default: 64, 32)")
    flags.add_argument("--width", type=int, default=16, help="channels of the U-Net's first level")
    options = flags.parse_args()
    device, axes, defaults = options.device, options.axes, {2: (400, 16, 64), 3: (150, 4, 32)}[options.axes]
    given = options.steps, options.batch, options.size
    steps, count, size = (default if one is None else one for one, default in zip(given, defaults, strict=True))
    batch = count, size, axes, device
    torch.manual_seed(0)

    def autocast(dtype: torch.dtype) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16)

    def loss_of(network: nn.Module, images: Tensor, classes: Tensor, dtype: torch.dtype) -> Tensor:
        with autocast(dtype):
            return functional.cross_entropy(network(images), classes)  # computed in float32, as autocast wants

    model = gemmconv.convert(UNet(options.width, axes).to(device))
    dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
    if options.dtype == "auto" and device.type == "cpu":
        tries = [partial(loss_of, model, *shapes(*batch), one) for one in (torch.bfloat16, torch.float32)]
        bfloat16_ms, float32_ms = times_by_turns(tries, device, rounds=1)
        if bfloat16_ms > 3 * float32_ms:
            dtype = torch.float32
            print(f"float32 is used: a forward pass in bfloat16 takes {bfloat16_ms:.0f} ms, not {float32_ms:.0f} ms")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    losses: list[float] = []
    for _ in progress(steps, "training", losses):
        optimizer.zero_grad()
        loss = loss_of(model, *shapes(*batch), dtype)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())

    images, classes = shapes(64 if axes == 2 else 8, size, axes, device)
    with_torch = UNet(options.width, axes).to(device)
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
    figure, panels = plt.subplot_mosaic("Labc;Ldef;Lghi", **layout)
    panels["L"].semilogy(losses)
    panels["L"].set(title="training loss (cross-entropy)", xlabel="step")
    panels["L"].grid(alpha=0.3)
    colours = {"vmin": 0, "vmax": len(CLASSES) - 1, "interpolation": "nearest"}
    for row, names in enumerate(("abc", "def", "ghi")):
        slices = [one[row] if axes == 2 else one[row, size // 2] for one in (images[:, 0], classes, found)]
        show(panels[names[0]], slices[0], "" if row else "input", cmap="gray", interpolation="nearest")
        show(panels[names[1]], slices[1], "" if row else "truth", **colours)
        show(panels[names[2]], slices[2], "" if row else "prediction", **colours)
    save(figure, options.out / "segmentation.png")

    print(f"training loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(
        f"IoU on {len(images)} new images: "
        + ", ".join(f"{name} {one:.3f}" for name, one in zip(CLASSES, iou, strict=True))
    )
    print(f"mean IoU {sum(iou) / len(iou):.3f}; largest difference from torch's logits {difference:.1e} of the largest")
    networks, data = (with_torch.train(), model.train()), shapes(*batch)
    with autocast(dtype):
        print(algorithms(model, images[:count], dtype=dtype))
    ms = times_by_turns([lambda n=network: loss_of(n, *data, dtype).backward() for network in networks], device)
    print(
        verdict(
            f"forward and backward of {count} in {str(dtype).removeprefix('torch.')} on {device.type}",
            *ms,
        )
    )


if __name__ == "__main__":
    main()
