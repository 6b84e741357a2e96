"""Families of public models by their own packages: tiny, random, converted, beside themselves before."""

import copy
import pickle
from functools import partial

import pytest
import torch

import gemmconv


def speech_t5(transformers):
    config = transformers.SpeechT5HifiGanConfig(
        model_in_dim=8, upsample_initial_channel=32, upsample_rates=[4, 2], upsample_kernel_sizes=[8, 4],
        resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]],
    )  # fmt: skip
    return transformers.SpeechT5HifiGan(config), (torch.randn(1, 12, 8),), 2


def encodec(transformers):
    config = transformers.EncodecConfig(num_filters=4, upsampling_ratios=[4, 2], hidden_size=16, codebook_dim=16)
    return transformers.EncodecModel(config).decoder, (torch.randn(1, 16, 12),), 2


def dac(transformers):
    config = transformers.DacConfig(
        encoder_hidden_size=4, downsampling_ratios=[2, 4], decoder_hidden_size=32, upsampling_ratios=[4, 2],
        n_codebooks=2, codebook_size=16, codebook_dim=4, hidden_size=16,
    )  # fmt: skip
    return transformers.DacModel(config).decoder, (torch.randn(1, 16, 12),), 2


def mimi(transformers):
    config = transformers.MimiConfig(
        num_filters=4, upsampling_ratios=[4, 2], hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, intermediate_size=32, codebook_size=16, codebook_dim=8,
        vector_quantization_hidden_dimension=8, upsample_groups=32,
    )  # fmt: skip
    return transformers.MimiModel(config).decoder, (torch.randn(1, 32, 12),), 2


def univnet(transformers):
    config = transformers.UnivNetConfig(num_mel_bins=10)
    return transformers.UnivNetModel(config), (torch.randn(1, 6, 10), torch.randn(1, 6, 64)), 3


def vits(transformers):
    config = transformers.VitsConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16, flow_size=16, upsample_rates=[4, 2],
        upsample_initial_channel=32, upsample_kernel_sizes=[8, 4], resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1]], vocab_size=10,
    )  # fmt: skip
    return transformers.VitsModel(config).decoder, (torch.randn(1, 16, 12),), 2


def sam(transformers):
    config = transformers.SamMaskDecoderConfig(
        hidden_size=16, mlp_dim=16, num_attention_heads=2, iou_head_hidden_dim=16
    )
    model = transformers.models.sam.modeling_sam.SamMaskDecoder(config)
    images, prompts = torch.randn(1, 16, 6, 6), torch.randn(1, 1, 2, 16)
    return model, (images, torch.randn(1, 16, 6, 6), prompts, torch.randn(1, 16, 6, 6), True), 2


def dpt(transformers):
    config = transformers.DPTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8,
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16,
    )  # fmt: skip
    return transformers.DPTForDepthEstimation(config), (torch.randn(1, 3, 32, 32),), 2


def monai_unet(nets, axes):
    model = nets.UNet(axes, 1, 2, (4, 8, 16), (2, 2), num_res_units=1)
    return model, (torch.randn(1, 1, *(16,) * axes),), 2


def dyn_unet(nets):
    model = nets.DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 16])
    return model, (torch.randn(1, 1, 16, 16, 16),), 2


def swin_unetr(nets):
    model = nets.SwinUNETR(in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))
    return model, (torch.randn(1, 1, 64, 32, 32),), 5


FAMILIES = {
    "transformers": (speech_t5, encodec, dac, mimi, univnet, vits, sam, dpt),
    "monai.networks.nets": (partial(monai_unet, axes=2), partial(monai_unet, axes=3), dyn_unet, swin_unetr),
}


def results(model, inputs):
    """All floating-point outputs, and the gradients of all parameters that have one."""
    torch.manual_seed(0)
    model.zero_grad()
    outputs = [one for one in torch.utils._pytree.tree_leaves(model(*inputs)) if isinstance(one, torch.Tensor)]
    outputs = [one for one in outputs if one.is_floating_point()]
    sum(one.square().mean() for one in outputs).backward()
    return [one.detach() for one in outputs] + [one.grad.clone() for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize(
    ("package", "family"), [(package, family) for package, families in FAMILIES.items() for family in families]
)
@pytest.mark.parametrize("algorithm", ["auto", "gemm_col2im"])
def test_a_converted_family_computes_the_same_and_goes_back(package, family, algorithm):
    torch.manual_seed(0)
    model, inputs, least = family(pytest.importorskip(package))
    kinds = torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d
    count = sum(isinstance(one, kinds) for one in model.modules())  # versions of a package differ by a layer
    assert count >= least
    model = model.double().eval()
    inputs = tuple(one.double() if isinstance(one, torch.Tensor) else one for one in inputs)
    before, keys = results(model, inputs), list(model.state_dict())
    try:
        is_pickled = bool(pickle.dumps(model))
    except (AttributeError, RuntimeError):  # hooks or parametrizations that no pickle can hold
        is_pickled = False
    gemmconv.convert(model, algorithm=algorithm)
    lines = gemmconv.report(model)
    assert len(lines) == sum(line.is_converted for line in lines) == count
    after = results(model, inputs)
    for one, other in zip(after, before, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    assert list(model.state_dict()) == keys
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)) if is_pickled else model):
        assert all(map(torch.equal, results(again, inputs), after))
        assert sum(line.is_converted for line in gemmconv.report(again)) == count
    gemmconv.revert(model)
    assert all(map(torch.equal, results(model, inputs), before))
    assert not any(line.is_converted for line in gemmconv.report(model))
