"""Policies: functions that decide which values of a forward pass are saved. See `fckpt.policies.named`."""

from __future__ import annotations

from fckpt.policies.decisions import Answer as Answer
from fckpt.policies.decisions import Decision as Decision
from fckpt.policies.decisions import Policy as Policy
from fckpt.policies.decisions import PolicyLike as PolicyLike
from fckpt.policies.decisions import PolicyNode as PolicyNode
from fckpt.policies.decisions import as_policy as as_policy
from fckpt.policies.decisions import combine_nested as combine_nested
from fckpt.policies.named import apply_policy as apply_policy
from fckpt.policies.named import checkpoint_dots as checkpoint_dots
from fckpt.policies.named import checkpoint_dots_with_no_batch_dims as checkpoint_dots_with_no_batch_dims
from fckpt.policies.named import dots_saveable as dots_saveable
from fckpt.policies.named import dots_with_no_batch_dims_saveable as dots_with_no_batch_dims_saveable
from fckpt.policies.named import everything_saveable as everything_saveable
from fckpt.policies.named import nothing_saveable as nothing_saveable
from fckpt.policies.named import reductions_saveable as reductions_saveable
from fckpt.policies.named import register_dot as register_dot
from fckpt.policies.named import save_any_names_but_these as save_any_names_but_these
from fckpt.policies.named import save_anything_except_these_names as save_anything_except_these_names
from fckpt.policies.named import save_from_both_policies as save_from_both_policies
from fckpt.policies.named import save_only_these_names as save_only_these_names
from fckpt.policies.names import checkpoint_name as checkpoint_name
from fckpt.policies.names import names_recorded as names_recorded

__all__ = [
    "Answer",
    "Decision",
    "Policy",
    "PolicyLike",
    "PolicyNode",
    "apply_policy",
    "as_policy",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
    "checkpoint_name",
    "combine_nested",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "names_recorded",
    "nothing_saveable",
    "reductions_saveable",
    "register_dot",
    "save_any_names_but_these",
    "save_anything_except_these_names",
    "save_from_both_policies",
    "save_only_these_names",
]
