"""Published numbers: what experiments should reach, and what weights score. ImageNet-1k, top-1, %."""

from __future__ import annotations

from dataclasses import dataclass

IMAGENET_TRAINING_IMAGES = 1_281_167


@dataclass(frozen=True)
class Published:
    """The published numbers of an experiment.

    Attributes:
        parameters: millions, with 1,000 classes.
        gmacs: billions of multiply-adds for one image of `size` pixels, half of the FLOPs that a run reports.
        top1: None if nothing was published for this recipe.
        source: where `top1` comes from, in a few words; the experiment's file has it in full.
        weights: a value for `weights=` that reaches it; empty if none can be downloaded by name or as one file.
    """

    parameters: float
    gmacs: float
    size: int
    top1: float | None
    source: str
    weights: str = ""


@dataclass(frozen=True)
class Score:
    """The accuracy of published weights on the 50,000 validation images at this size."""

    top1: float
    size: int
    source: str


_DEIT = "DeiT, README_deit.md"
_DEIT3 = "DeiT III, README_revenge.md"
_PLAIN = "Beyer et al. 2022"
_EARLY = "Xiao et al. 2021, Table 2"
_MAE = "MAE, FINETUNE.md"
_AUGREG = "vision_transformer, README.md"
_RSB = "Wightman et al. 2021"
_PYCLS = "PyCls, MODEL_ZOO.md"
_TORCHVISION = "torchvision, weights' description"

EXPERIMENTS: dict[str, Published] = {
    "vit_ti16": Published(5.7, 1.26, 224, None, "DeiT's recipe without repeats"),
    "vit_s16": Published(22.1, 4.61, 224, None, "DeiT's recipe without repeats"),
    "vit_b16": Published(86.6, 17.6, 224, None, "DeiT's recipe without repeats"),
    "vit_l16": Published(304.3, 61.6, 224, 82.6, "MAE, Table 3"),
    "vit_h16": Published(632.2, 126.7, 224, 83.1, "MAE, Table 3, of H/14"),
    "deit_ti16": Published(5.7, 1.26, 224, 72.2, _DEIT, "timm:deit_tiny_patch16_224.fb_in1k"),
    "deit_s16": Published(22.1, 4.61, 224, 79.9, _DEIT, "timm:deit_small_patch16_224.fb_in1k"),
    "deit_b16": Published(86.6, 17.6, 224, 81.8, _DEIT, "timm:deit_base_patch16_224.fb_in1k"),
    "deit3_s16": Published(22.0, 4.6, 224, 81.4, _DEIT3, "timm:deit3_small_patch16_224.fb_in1k"),
    "deit3_b16": Published(86.6, 17.5, 224, None, "first part of deit3_b16_224"),
    "deit3_b16_224": Published(86.6, 17.5, 224, 83.8, _DEIT3, "timm:deit3_base_patch16_224.fb_in1k"),
    "deit3_l16": Published(304.4, 61.6, 224, None, "first part of deit3_l16_224"),
    "deit3_l16_224": Published(304.4, 61.6, 224, 84.9, _DEIT3, "timm:deit3_large_patch16_224.fb_in1k"),
    "deit3_h14": Published(632.1, 167.4, 224, None, "first part of deit3_h14_224"),
    "deit3_h14_224": Published(632.1, 167.4, 224, 85.2, _DEIT3, "timm:deit3_huge_patch14_224.fb_in1k"),
    "vit_s16_90ep": Published(22.1, 4.6, 224, 76.5, _PLAIN),
    "vit_s16_300ep": Published(22.1, 4.6, 224, 80.0, _PLAIN),
    "vit_p_1gf": Published(4.8, 1.1, 224, 72.3, _EARLY),
    "vit_p_4gf": Published(18.5, 3.9, 224, 80.4, _EARLY),
    "vit_p_18gf": Published(86.6, 17.5, 224, 82.1, _EARLY),
    "vit_p_36gf": Published(178.4, 35.9, 224, 81.8, _EARLY),
    "vit_c_1gf": Published(4.6, 1.1, 224, 75.3, _EARLY),
    "vit_c_4gf": Published(17.8, 4.0, 224, 81.4, _EARLY),
    "vit_c_18gf": Published(81.6, 17.7, 224, 83.0, _EARLY),
    "vit_c_36gf": Published(167.8, 35.0, 224, 83.2, _EARLY),
    "mae_finetune_b16": Published(86.6, 17.5, 224, 83.66, _MAE, "mae_finetuned_vit_base.pth"),
    "mae_finetune_l16": Published(304.3, 61.6, 224, 85.95, _MAE, "mae_finetuned_vit_large.pth"),
    "mae_finetune_h14": Published(632.0, 167.3, 224, 86.93, _MAE, "mae_finetuned_vit_huge.pth"),
    "augreg_finetune_ti16_384": Published(
        5.8, 4.7, 384, 78.22, _AUGREG, "timm:vit_tiny_patch16_384.augreg_in21k_ft_in1k"
    ),
    "augreg_finetune_s16_384": Published(
        22.2, 15.5, 384, 83.73, _AUGREG, "timm:vit_small_patch16_384.augreg_in21k_ft_in1k"
    ),
    "augreg_finetune_b16_384": Published(
        86.9, 55.5, 384, 85.49, _AUGREG, "timm:vit_base_patch16_384.augreg_in21k_ft_in1k"
    ),
    "augreg_finetune_l16_384": Published(
        304.7, 191.2, 384, 85.59, _AUGREG, "timm:vit_large_patch16_384.augreg_in21k_ft_in1k"
    ),
    "torchvision_vit_b16": Published(86.6, 17.56, 224, 81.07, _TORCHVISION, "torchvision:vit_b_16.IMAGENET1K_V1"),
    "torchvision_resnet50_v1": Published(25.6, 4.09, 224, 76.13, _TORCHVISION, "torchvision:resnet50.IMAGENET1K_V1"),
    "torchvision_resnet50_v2": Published(25.6, 4.09, 224, 80.86, _TORCHVISION, "torchvision:resnet50.IMAGENET1K_V2"),
    "rsb_a1": Published(25.6, 4.1, 224, 80.4, _RSB, "timm:resnet50.a1_in1k"),
    "rsb_a2": Published(25.6, 4.1, 224, 79.8, _RSB, "timm:resnet50.a2_in1k"),
    "rsb_a3": Published(25.6, 4.1, 224, 78.1, _RSB, "timm:resnet50.a3_in1k"),
    "resnet18": Published(11.7, 1.8, 224, None, "PyCls' recipe for R-50"),
    "resnet50": Published(25.6, 4.1, 224, 76.8, _PYCLS, "R-50-1x64d_dds_8gpu.pyth"),
    "regnetx_4gf": Published(22.1, 4.0, 224, 78.6, _PYCLS, "timm:regnetx_040.pycls_in1k"),
    "regnety_4gf": Published(20.6, 4.0, 224, 79.4, _PYCLS, "timm:regnety_040.pycls_in1k"),
    "resnet50_16ep": Published(25.6, 4.1, 224, 73.8, "ffcv-imagenet, README.md"),
}

_TIMM = "timm, results/results-imagenet.csv"

# By the weights' full name, or by the name of their file, which has to be scored as its experiment evaluates.
WEIGHTS: dict[str, Score] = {
    "timm:deit_tiny_patch16_224.fb_in1k": Score(72.190, 224, _TIMM),
    "timm:deit_small_patch16_224.fb_in1k": Score(79.856, 224, _TIMM),
    "timm:deit_base_patch16_224.fb_in1k": Score(81.980, 224, _TIMM),
    "timm:deit3_small_patch16_224.fb_in1k": Score(81.382, 224, _TIMM),
    "timm:deit3_base_patch16_224.fb_in1k": Score(83.800, 224, _TIMM),
    "timm:deit3_large_patch16_224.fb_in1k": Score(84.772, 224, _TIMM),
    "timm:deit3_huge_patch14_224.fb_in1k": Score(85.204, 224, _TIMM),
    "timm:vit_tiny_patch16_384.augreg_in21k_ft_in1k": Score(78.438, 384, _TIMM),
    "timm:vit_small_patch16_384.augreg_in21k_ft_in1k": Score(83.814, 384, _TIMM),
    "timm:vit_base_patch16_384.augreg_in21k_ft_in1k": Score(86.010, 384, _TIMM),
    "timm:vit_large_patch16_384.augreg_in21k_ft_in1k": Score(87.096, 384, _TIMM),
    "timm:resnet50.a1_in1k": Score(81.240, 288, _TIMM),
    "timm:resnet50.a2_in1k": Score(80.774, 288, _TIMM),
    "timm:resnet50.a3_in1k": Score(78.052, 224, _TIMM),
    "timm:resnet50.tv_in1k": Score(76.156, 224, _TIMM),
    "timm:resnet50.tv2_in1k": Score(80.846, 224, _TIMM),
    "timm:regnetx_040.pycls_in1k": Score(78.486, 224, _TIMM),
    "timm:regnety_040.pycls_in1k": Score(79.246, 224, _TIMM),
    "torchvision:resnet50.IMAGENET1K_V1": Score(76.130, 224, _TORCHVISION),
    "torchvision:resnet50.IMAGENET1K_V2": Score(80.858, 224, _TORCHVISION),
    "torchvision:vit_b_16.IMAGENET1K_V1": Score(81.072, 224, _TORCHVISION),
    "mae_finetuned_vit_base.pth": Score(83.664, 224, _MAE),
    "mae_finetuned_vit_large.pth": Score(85.952, 224, _MAE),
    "mae_finetuned_vit_huge.pth": Score(86.928, 224, _MAE),
    "R-50-1x64d_dds_8gpu.pyth": Score(76.8, 224, _PYCLS),
}
