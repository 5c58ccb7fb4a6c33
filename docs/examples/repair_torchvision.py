"""Makes `import torchvision` work beside a torch of another build; timm and transformers import it.

A CPU torch beside a torchvision that was built for CUDA (or the other way round) cannot load torchvision's
compiled operations, and then not even its Python part imports: "operator torchvision::nms does not exist".
Models do not need those operations. So the two that the import asks for are declared, without a body.

Nothing happens where torchvision imports as it is, or is not installed. The lasting cure is to install torch
and torchvision from the same place. Seen with torch 2.13 and torchvision 0.28.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch

_libraries: list[Any] = []  # operations are withdrawn when their library is collected


def repair() -> None:
    """Imports torchvision, with its missing operations declared if that is what it takes."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operation in ("nms", "qnms"):
            library.define(f"{operation}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)
        import torchvision  # noqa: F401


repair()
