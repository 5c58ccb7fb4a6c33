"""Recurrent networks (`nn.LSTM`, `nn.GRU`, `nn.RNN`) in a capture, which holds for sequences of any length.

A capture has one node for all layers and steps of such a network. To know the sizes of its results, torch runs the
steps one by one, in Python, on tensors without data: that takes long, and the capture would hold for one length only.
All steps have results of the same sizes, so one step is enough here.

Seen on torch 2.11 and 2.13: `torch._decomp.decompositions.one_layer_lstm`, `one_layer_rnn`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._decomp import decompositions

from fckpt._capture.patching import patched

__all__ = ["steps_alike"]


def _of_one_step(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function for a layer, which returns the outputs of all steps and the final state."""

    @functools.wraps(layer)
    def wrap(inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs, state = layer(inputs[:1], *args, **kwargs)
        return outputs.repeat(inputs.shape[0], 1, 1), state

    return wrap


@contextmanager
def steps_alike() -> Iterator[None]:
    """Makes torch infer the sizes of recurrent layers from one step within the body."""
    with (
        patched(decompositions, "one_layer_lstm", _of_one_step),
        patched(decompositions, "one_layer_rnn", _of_one_step),
    ):
        yield
