"""The hooks by which Hugging Face's models collect hidden states.

A model registers them in the first call that asks for hidden states, under a lock, which Dynamo cannot enter. So they
are registered before the call is captured. Seen on transformers 5: `transformers.utils.output_capturing`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from fckpt._call.closure import closure_of

__all__ = ["output_hooks_registered"]

_REGISTER = "maybe_install_capturing_hooks"
_FLAG = "_output_capturing_hooks_installed"


def output_hooks_registered(fn: Callable[..., Any], reason: str) -> bool:
    """Registers the hooks of the models in a function's closure, if they are the reason why it was not captured.

    Returns:
        Whether any were registered.
    """
    register = getattr(sys.modules.get("transformers.utils.output_capturing"), _REGISTER, None)
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if _REGISTER not in reason or register is None or kind is None:
        return False
    found = False
    for module in [m for root in closure_of([fn]).modules for m in root.modules()]:
        # The hooks of a model are registered together with those of the models inside it.
        if isinstance(module, kind) and not any(_has_hooks(m) for m in module.modules()):
            register(module)
            found = True
    return found


def _has_hooks(module: nn.Module) -> bool:
    return bool(getattr(module, _FLAG, False))
