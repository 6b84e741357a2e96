"""Algorithms that are wrong or fail, for the tests of what measures them."""

import torch

from gemmconv.algorithms.native import Native


class Wrong(Native):
    """torch's operator, right but for one pass, whose result is damaged."""

    def __init__(self, direction, damage):
        self.direction, self.damage = direction, damage

    def prepare(self, config, direction, tile=None):
        if direction == "grads":
            input_grad, weight_grad = self.prepare(config, "input_grad"), self.prepare(config.of_weight, "weight_grad")
            return lambda grad_output, input, weight: (input_grad(grad_output, weight), weight_grad(grad_output, input))
        call = super().prepare(config, direction)
        return call if direction != self.direction else lambda *tensors: self.damage(call(*tensors))


def off(result):
    return result * 1.001


def unwritten(result):
    fresh = torch.empty_like(result)  # holds NaN: the gate sees to that
    fresh[1:] = result[1:]
    return fresh


def one_nan(result):
    result = result.clone()
    result[0, 0, 0, 0] = torch.nan
    return result


def broken(result):
    raise ArithmeticError("first line\nsecond line")


def take_alone(monkeypatch, fake):
    """Let an algorithm be the only one there is, on the CPU too."""
    monkeypatch.setattr("gemmconv.ops.is_left_to_torch", lambda *_: False)
    for place in ("algorithms", "selection"):
        monkeypatch.setattr(f"gemmconv.{place}.ALGORITHMS", (fake,))
    monkeypatch.setattr("gemmconv.selection.BY_NAME", {fake.name: fake})
    monkeypatch.setattr("gemmconv.selection.preference", lambda config, direction="forward": [(fake, "alone")])
