"""Models that others wrote, built from configurations with random weights (extra `zoo-tests`)."""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    # The compiled operators of torchvision do not load with a CPU build of torch. No model here
    # uses them, but importing timm needs these two to exist.
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, _name):
            _library.define(f"{_name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
