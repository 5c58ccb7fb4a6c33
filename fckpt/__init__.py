"""fckpt: train the same function in less memory. Functional rematerialisation for PyTorch."""

from fckpt import cost as cost
from fckpt import graph as graph
from fckpt import policies as policies
from fckpt import solve as solve
from fckpt._autodiff import grad as grad
from fckpt._autodiff import grad_and_value as grad_and_value
from fckpt._autodiff import vjp as vjp
from fckpt._blocks import Blocks as Blocks
from fckpt._blocks import remat_blocks as remat_blocks
from fckpt._check import Check as Check
from fckpt._check import check as check
from fckpt._compile import registration as _registration  # noqa: F401  # the backend "fckpt" of torch.compile
from fckpt._estimate import Estimate as Estimate
from fckpt._estimate import estimate as estimate
from fckpt._inspect import plan as plan
from fckpt._inspect import print_saved_residuals as print_saved_residuals
from fckpt._inspect import saved_residuals as saved_residuals
from fckpt._inspect import stats as stats
from fckpt._largest import largest as largest
from fckpt._memory import PeakMemory as PeakMemory
from fckpt._memory import measure_peak as measure_peak
from fckpt._module import Functional as Functional
from fckpt._module import from_module as from_module
from fckpt._pareto import Pareto as Pareto
from fckpt._pareto import ParetoPoint as ParetoPoint
from fckpt._pareto import pareto as pareto
from fckpt._planned.ledger import Stats as Stats
from fckpt._planned.plan import Plan as Plan
from fckpt._remat import remat as remat
from fckpt._sequential import sequential as sequential
from fckpt._step import TrainingStep as TrainingStep
from fckpt._step import step as step
from fckpt.errors import ArgumentTypeError as ArgumentTypeError
from fckpt.errors import ArgumentValueError as ArgumentValueError
from fckpt.errors import BudgetError as BudgetError
from fckpt.errors import BudgetWarning as BudgetWarning
from fckpt.errors import CacheWarning as CacheWarning
from fckpt.errors import CheckpointError as CheckpointError
from fckpt.errors import ClosureError as ClosureError
from fckpt.errors import FckptError as FckptError
from fckpt.errors import GradientWarning as GradientWarning
from fckpt.errors import ImpureFunctionError as ImpureFunctionError
from fckpt.errors import KernelWarning as KernelWarning
from fckpt.errors import MeasurementError as MeasurementError
from fckpt.errors import MeshWarning as MeshWarning
from fckpt.errors import MutationError as MutationError
from fckpt.errors import OpaqueOutputError as OpaqueOutputError
from fckpt.errors import PlanError as PlanError
from fckpt.errors import PlanWarning as PlanWarning
from fckpt.errors import PolicyWarning as PolicyWarning
from fckpt.errors import RandomStateError as RandomStateError
from fckpt.errors import RankFailure as RankFailure
from fckpt.errors import ScheduleError as ScheduleError
from fckpt.errors import TraceError as TraceError
from fckpt.policies.names import checkpoint_name as checkpoint_name
from fckpt.report.table import Residual as Residual
from fckpt.spmd import Link as Link
from fckpt.spmd import Mesh as Mesh
from fckpt.spmd import P as P
from fckpt.spmd import Saving as Saving
from fckpt.spmd import Simulation as Simulation
from fckpt.spmd import all_gather as all_gather
from fckpt.spmd import all_to_all as all_to_all
from fckpt.spmd import axis_index as axis_index
from fckpt.spmd import axis_size as axis_size
from fckpt.spmd import clip_grad_norm as clip_grad_norm
from fckpt.spmd import fake_mesh as fake_mesh
from fckpt.spmd import fold_in as fold_in
from fckpt.spmd import init_mesh as init_mesh
from fckpt.spmd import launch as launch
from fckpt.spmd import load as load
from fckpt.spmd import part_mask as part_mask
from fckpt.spmd import pmap as pmap
from fckpt.spmd import pmax as pmax
from fckpt.spmd import pmean as pmean
from fckpt.spmd import pmin as pmin
from fckpt.spmd import ppermute as ppermute
from fckpt.spmd import psum as psum
from fckpt.spmd import psum_scatter as psum_scatter
from fckpt.spmd import pvary as pvary
from fckpt.spmd import save as save
from fckpt.spmd import shard as shard
from fckpt.spmd import shard_map as shard_map
from fckpt.spmd import sim as sim
from fckpt.spmd import specs_for as specs_for
from fckpt.spmd import unshard as unshard
from fckpt.spmd import use_mesh as use_mesh

__version__ = "0.1.0"

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "Blocks",
    "BudgetError",
    "BudgetWarning",
    "CacheWarning",
    "Check",
    "CheckpointError",
    "ClosureError",
    "Estimate",
    "FckptError",
    "Functional",
    "GradientWarning",
    "ImpureFunctionError",
    "KernelWarning",
    "Link",
    "MeasurementError",
    "Mesh",
    "MeshWarning",
    "MutationError",
    "OpaqueOutputError",
    "P",
    "Pareto",
    "ParetoPoint",
    "PeakMemory",
    "Plan",
    "PlanError",
    "PlanWarning",
    "PolicyWarning",
    "RandomStateError",
    "RankFailure",
    "Residual",
    "Saving",
    "ScheduleError",
    "Simulation",
    "Stats",
    "TraceError",
    "TrainingStep",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "check",
    "checkpoint_name",
    "clip_grad_norm",
    "cost",
    "estimate",
    "fake_mesh",
    "fold_in",
    "from_module",
    "grad",
    "grad_and_value",
    "graph",
    "init_mesh",
    "largest",
    "launch",
    "load",
    "measure_peak",
    "pareto",
    "part_mask",
    "plan",
    "pmap",
    "pmax",
    "pmean",
    "pmin",
    "policies",
    "ppermute",
    "print_saved_residuals",
    "psum",
    "psum_scatter",
    "pvary",
    "remat",
    "remat_blocks",
    "save",
    "saved_residuals",
    "sequential",
    "shard",
    "shard_map",
    "sim",
    "solve",
    "specs_for",
    "stats",
    "step",
    "unshard",
    "use_mesh",
    "vjp",
]


def __dir__() -> list[str]:
    """Lists only the public names, not the modules that define them."""
    return [*__all__, "__version__", "__doc__"]
