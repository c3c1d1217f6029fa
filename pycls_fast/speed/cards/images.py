"""Cards: from encoded images to batches on the device."""

from pycls_fast.speed.switch import Switch, SwitchName

IMAGES: tuple[Switch, ...] = (
    Switch(
        name=SwitchName.DECODE,
        values=("pillow", "simplejpeg", "region"),
        fast={"cpu": "region", "cuda": "region"},
        numerics="rounding",
        requires={},
        note="How JPEGs become crops: the whole image by Pillow, the whole image by simplejpeg with torch's resize, or "
        "only the rows and blocks that the crop needs, resized row by row (region: C, compiled on first use). Pillow "
        "always decodes other formats and damaged files, which are then resized in the same way.",
        mathematics="Boxes and flips are the same draws. Decoded pixels are the same bits; resized ones differ by a "
        "rounding. 200 ImageNet JPEGs at 224, mean absolute difference from Pillow 13 in grey levels of 255: region "
        "0.031 bilinear and 0.035 bicubic in training (164 of 200 crops are equal to the bit; in the others Pillow "
        "resizes columns before rows), 0 in evaluation; simplejpeg 0.033, 0.038 and 0.002, 0.004. No pixel is off by "
        "more than 1 (bilinear, training), 2 (evaluation), 13 (bicubic, at edges).",
        helps="Wherever the processor cannot decode as fast as the device trains. Training crops of 200 ImageNet "
        "JPEGs, one worker, times the rate with Pillow: simplejpeg 1.16x, region 1.61x; times torchvision's preset "
        "1.57x and 2.32x (docs/results/input_pipeline.md).",
        hurts="region needs a C compiler and libjpeg-turbo's header, simplejpeg its package (pip install "
        "-e '.[jpeg]'): the fast preset takes what is installed. Little is gained for progressive JPEGs, which must be "
        "read completely before any pixel is known.",
        source="libjpeg-turbo's jpeg_skip_scanlines and jpeg_crop_scanline; DALI's and FFCV's crops before decoding; "
        "Pillow's resampling.",
        ran="CPU (torch 2.15, libjpeg-turbo 2.1.5). Images do not reach the device before, so CUDA changes nothing.",
    ),
    Switch(
        name=SwitchName.DECODE_SCALE,
        values=("full", "dct"),
        fast={"cpu": "full", "cuda": "full"},
        numerics="training",
        requires={},
        note="JPEGs whose crop is at least 2, 4 or 8 times as large as the training image both ways are decoded "
        "at a half, a quarter or an eighth of their size by a smaller inverse DCT, and resized from there. With "
        "speed.decode=region; evaluation decodes in full.",
        mathematics="The low frequencies of each 8 x 8 block stand in for the average that the resizing filter takes: "
        "other pixels, a little sharper or with more aliasing. Of the crops that change, the mean absolute difference "
        "is 0.9 to 1.2 grey levels of 255 (5% of ImageNet's crops at 224, 90% at 112).",
        helps="Photographs of several megapixels, and small training images. Training crops on one core, bilinear, 5 "
        "rounds: photographs of 12 megapixels at 224, 2.6x; 200 ImageNet JPEGs at 112, 1.21x, at 224, 1.03x.",
        hurts="Changes pixels beyond rounding: try it in the ledger before relying on it. No effect at 224 pixels on "
        "most of ImageNet's crops, which are smaller than 448.",
        source="libjpeg's scale_denom; Pillow's draft mode.",
        ran="CPU (libjpeg-turbo 2.1.5). Images do not reach the device before, so CUDA changes nothing.",
    ),
    Switch(
        name=SwitchName.INPUT_COPY,
        values=("blocking", "prefetch"),
        fast={"cpu": "blocking", "cuda": "prefetch"},
        numerics="identical",
        requires={"prefetch": "cuda"},
        note="Batches travel on a side stream, two in flight, while the step before them computes.",
        mathematics="None.",
        helps="When copying a batch to the device takes a share of the step that is worth hiding.",
        hurts="One more batch lies in device memory.",
        source="torch CUDA semantics: use pinned memory buffers; the prefetcher of NVIDIA's ImageNet examples.",
        ran="CUDA only: not run.",
    ),
    Switch(
        name=SwitchName.NORMALIZE_ON,
        values=("cpu", "device"),
        fast={"cpu": "device", "cuda": "device"},
        numerics="rounding",
        requires={},
        note="Where uint8 images become normalised floating-point ones: in the loader's workers, as plain loops do "
        "(torchvision's ToTensor and Normalize), or on the device after the copy.",
        mathematics="None, and the same bits on a CPU; CUDA may multiply by 1 / 255 where the CPU divides.",
        helps="The copy to the device, the pinned memory and the queue of the workers hold a quarter of the bytes.",
        hurts="Nothing known. On cpu the workers, which are short on big machines, do the arithmetic.",
        source="NVIDIA's ImageNet example and timm (their prefetchers normalise on the device).",
        ran="CPU (torch 2.11 and 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.ERASE_ON,
        values=("cpu", "device"),
        fast={"cpu": "device", "cuda": "device"},
        numerics="rounding",
        requires={},
        note="Where the boxes of random erasing are filled; cpu is in the loader's workers, only with "
        "speed.normalize_on=cpu, because the fill values are not uint8. The workers draw the boxes in any case.",
        mathematics="None, and the same bits on a CPU. On CUDA augment.erase_value=noise draws different numbers of "
        "the same distribution from the same seed, since CPU and CUDA have different generators.",
        helps="Noise costs a worker about as much as decoding a small image; on a GPU its cost is negligible.",
        hurts="Nothing known.",
        source="Zhong et al., Random Erasing Data Augmentation, 2017, arXiv 1708.04896; timm erases on the device.",
        ran="CPU (torch 2.11 and 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.MIX_ON,
        values=("cpu", "device"),
        fast={"cpu": "device", "cuda": "device"},
        numerics="rounding",
        requires={},
        note="Where mixup and CutMix mix a microbatch; cpu is in the loader's workers, on images that were "
        "normalised and erased there. The pairing is drawn from the same seed.",
        mathematics="None, and the same bits on a CPU with float32 weights; with 16-bit weights the CPU mixes before "
        "rounding and the device after it.",
        helps="One pass over the batch is negligible on a GPU, and workers are better used for decoding.",
        hurts="Nothing known.",
        source="Zhang et al., mixup, 2017, arXiv 1710.09412; Yun et al., CutMix, 2019, arXiv 1905.04899; torchvision's "
        "references mix in the loader's collate function.",
        ran="CPU (torch 2.11 and 2.15). CUDA: not run.",
    ),
)
