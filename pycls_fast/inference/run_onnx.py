"""Classes of images by an exported ONNX file, without pycls_fast: `python run_onnx.py model.onnx cat.jpg dog.png ...`.

It needs numpy, Pillow and onnxruntime. Copy what you need.
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def prepared(image: Image.Image, how: dict) -> np.ndarray:
    """The part of an image that the network sees, at its size: uint8 (3, H, W)."""
    image = ImageOps.exif_transpose(image) if how["exif_orientation"] else image
    if image.mode.startswith("I"):
        # Pillow would clip 16 bits at 255.
        image = Image.fromarray(((np.asarray(image).astype(np.int32) + 128) // 257).astype(np.uint8))
    if image.mode == "F":
        # The same of floats; full scale is the smallest of these that holds them.
        values = np.asarray(image).astype(np.float64)
        full_scale = next((scale for scale in (1, 255) if values.max() <= scale), 65535)
        image = Image.fromarray(np.rint(values * (255 / full_scale)).astype(np.uint8))
    if how["transparent"] == "white" and image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image = image.convert("RGB")
    size = how["image_size"]
    height, width = size if isinstance(size, list) else (size, size)
    to_height, to_width = (round(side / how["crop_ratio"]) for side in (height, width))
    ratios = to_width / image.width, to_height / image.height
    if how["crop"] == "squash":
        resized = to_width, to_height
    elif how["crop"] == "border":
        resized = tuple(max(round(side * min(ratios)), 1) for side in image.size)
    elif ratios[0] >= ratios[1]:
        resized = to_width, to_width * image.height // image.width
    else:
        resized = to_height * image.width // image.height, to_height
    image = image.resize(resized, Image.Resampling[how["interpolation"].upper()])
    cut_width, cut_height = min(width, image.width), min(height, image.height)
    left, top = round((image.width - cut_width) / 2), round((image.height - cut_height) / 2)
    cut = image.crop((left, top, left + cut_width, top + cut_height))
    whole = Image.new("RGB", (width, height), tuple(round(255 * value) for value in how["mean"]))
    whole.paste(cut, ((width - cut_width) // 2, (height - cut_height) // 2))
    return np.asarray(whole).transpose(2, 0, 1)


def main() -> None:
    """Print the likeliest class of each image, and its probability."""
    file, *paths = sys.argv[1:]
    session = onnxruntime.InferenceSession(file)
    texts = session.get_modelmeta().custom_metadata_map
    classes, how = json.loads(texts["classes"]), json.loads(texts["preprocessing"])
    for path in paths:
        (logits,) = session.run(["logits"], {"images": prepared(Image.open(path), how)[None]})
        # Less the largest one, which no exponential exceeds.
        weights = np.exp(logits[0] - logits[0].max())
        # Trained with binary cross-entropy, each class has a probability of its own.
        probabilities = weights / weights.sum() if texts["outputs"] == "softmax" else 1.0 / (1.0 + np.exp(-logits[0]))
        label = int(logits[0].argmax())
        print(f"{path}: {classes[label] if label < len(classes) else label} ({probabilities[label]:.1%})")


if __name__ == "__main__":
    main()
