"""Boxes (top, left, height, width) of pixels, one for each image of a batch."""

from __future__ import annotations

import torch


def box_mask(box_B4: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """`mask_BHW`, true within each image's box (top, left, height, width)."""
    top_B1, left_B1, height_B1, width_B1 = box_B4.split(1, dim=1)
    y_H = torch.arange(height, device=box_B4.device)
    x_W = torch.arange(width, device=box_B4.device)
    rows_BH = (y_H >= top_B1) & (y_H < top_B1 + height_B1)
    columns_BW = (x_W >= left_B1) & (x_W < left_B1 + width_B1)
    return rows_BH[:, :, None] & columns_BW[:, None, :]
