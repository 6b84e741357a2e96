"""Distributed training: an autoencoder of photograph crops under DistributedDataParallel, started by torchrun.

    torchrun --nproc-per-node 2 examples/distributed.py

One learns that a model is converted before it is wrapped, and that nothing else changes: each process draws crops of
its own, DDP averages the gradients, and all processes hold equal gradients to the last bit, which the example checks.
On CPUs, the default, processes talk by gloo; with --device cuda by NCCL, and each needs a GPU of its own.

Expect a loss that falls to a twentieth in one to two minutes, and blurred but recognisable crops, since 256 numbers
stand for 12288. A step is about as fast as with torch's layers or a little faster: the encoder and DDP take most of it.
"""

from __future__ import annotations

import copy
import os
from itertools import pairwise

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import gemmconv
from common import algorithms, check_same, parser, photograph, plt, progress, save, show, times_by_turns, verdict

SIZE = 64  # height and width of a crop in pixels


def autoencoder(width: int) -> nn.Sequential:
    """Make the network, [N, 3, 64, 64] -> [N, 3, 64, 64], by way of a code of [N, 16, 4, 4]."""
    channels = 3, width, 2 * width, 4 * width
    layers: list[nn.Module] = []
    for before, after in pairwise(channels):
        layers += [nn.Conv2d(before, after, 4, 2, 1), nn.ReLU()]
    layers += [nn.Conv2d(channels[-1], 16, 4, 2, 1), nn.ConvTranspose2d(16, channels[-1], 4, 2, 1)]
    for before, after in pairwise(channels[::-1]):
        layers += [nn.ReLU(), nn.ConvTranspose2d(before, after, 4, 2, 1)]
    return nn.Sequential(*layers, nn.Sigmoid())


def crops(photo: Tensor, count: int) -> Tensor:
    """Cut random squares of the photograph: [3, H, W] -> [count, 3, 64, 64]."""
    tops = torch.randint(photo.shape[1] - SIZE, (count,)).tolist()
    lefts = torch.randint(photo.shape[2] - SIZE, (count,)).tolist()
    return torch.stack([photo[:, y : y + SIZE, x : x + SIZE] for y, x in zip(tops, lefts, strict=True)])


def check_gradients(model: nn.Module) -> None:
    """Raise RuntimeError unless all processes hold the same gradients, bit for bit."""
    mine = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    of_all = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(of_all, mine)
    if not all(torch.equal(mine, other) for other in of_all):
        raise RuntimeError("gradients must be equal in all processes, and are not")


def main() -> None:
    flags = parser(__doc__)
    flags.set_defaults(device="cpu")  # a machine with one GPU cannot give one to each process
    flags.add_argument("--steps", type=int, default=1000, help="training steps")
    flags.add_argument("--batch", type=int, default=16, help="crops of a step in each process")
    flags.add_argument("--width", type=int, default=32, help="channels after the first layer")
    options = flags.parse_args()
    if "RANK" not in os.environ:
        flags.error("start it by torchrun --nproc-per-node 2 examples/distributed.py")
    device = options.device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(rank)  # DDP copies the weights of rank 0 to all; crops differ

    photo = photograph().to(device)
    plain = autoencoder(options.width).to(device)
    ours = gemmconv.convert(copy.deepcopy(plain))  # before DDP, which keeps the modules it is given
    model = DistributedDataParallel(ours)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    losses: list[float] = []
    checks = 0
    for step in progress(options.steps, "training", losses) if rank == 0 else range(options.steps):
        images = crops(photo, options.batch)
        loss = functional.mse_loss(model(images), images)
        optimizer.zero_grad()
        loss.backward()
        if step % max(1, options.steps // 10) == 0:
            check_gradients(model)
            checks += 1
        optimizer.step()
        schedule.step()
        mean = loss.detach() / world
        distributed.all_reduce(mean)
        losses.append(mean.item())

    plain.load_state_dict(ours.state_dict())
    images = crops(photo, options.batch)
    with torch.no_grad():
        difference = check_same(ours(images), plain(images), 5e-3 if device.type == "cuda" else 1e-4)  # TF32 on GPUs
    # All processes take the same number of timed steps, since each step waits for the others.
    networks = DistributedDataParallel(plain), model
    runs = [lambda n=network: functional.mse_loss(n(images), images).backward() for network in networks]
    ms = times_by_turns(runs, device)

    if rank == 0:
        many = crops(photo, 64)
        shown = many[many.std((1, 2, 3)).argsort(descending=True)[:8]]  # most others are cloth or wall
        with torch.no_grad():
            result = ours(shown)
        layout = {"figsize": (16, 3.8), "width_ratios": (3, *8 * [1]), "layout": "constrained"}
        figure, axes = plt.subplot_mosaic("Labcdefgh;Lijklmnop", **layout)
        axes["L"].semilogy(losses)
        axes["L"].set(title=f"loss (mean squared error), {world} processes", xlabel="step")
        axes["L"].grid(alpha=0.3)
        for index in range(8):
            show(axes["abcdefgh"[index]], shown[index], "" if index else "crop")
            show(axes["ijklmnop"[index]], result[index], "" if index else "reconstruction")
        save(figure, options.out / "distributed.png")
        print(f"training loss: {losses[0]:.4f} -> {losses[-1]:.4f}")
        print(f"gradients of {world} processes are equal bit for bit in {checks} of {checks} steps that were checked")
        print(f"largest difference from torch's outputs: {difference:.1e} of the largest value")
        print(algorithms(ours, images))
        print(verdict(f"forward and backward of {world} x {options.batch} crops on {device.type}", *ms))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
