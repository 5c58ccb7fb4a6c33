"""fckpt: train the same function in less memory. Functional rematerialisation for PyTorch."""

from fckpt import cost as cost
from fckpt import policies as policies
from fckpt import solve as solve
from fckpt.api import remat as remat
from fckpt.autodiff import grad as grad
from fckpt.autodiff import grad_and_value as grad_and_value
from fckpt.autodiff import vjp as vjp
from fckpt.check import Check as Check
from fckpt.check import check as check
from fckpt.errors import ArgumentTypeError as ArgumentTypeError
from fckpt.errors import ArgumentValueError as ArgumentValueError
from fckpt.errors import BudgetError as BudgetError
from fckpt.errors import ClosureError as ClosureError
from fckpt.errors import FckptError as FckptError
from fckpt.errors import ImpureFunctionError as ImpureFunctionError
from fckpt.errors import MutationError as MutationError
from fckpt.errors import OpaqueOutputError as OpaqueOutputError
from fckpt.errors import PlanError as PlanError
from fckpt.errors import PolicyWarning as PolicyWarning
from fckpt.errors import RandomStateError as RandomStateError
from fckpt.errors import ScheduleError as ScheduleError
from fckpt.errors import TraceError as TraceError
from fckpt.looking import ParetoPoint as ParetoPoint
from fckpt.looking import pareto as pareto
from fckpt.looking import plan as plan
from fckpt.looking import print_saved_residuals as print_saved_residuals
from fckpt.looking import saved_residuals as saved_residuals
from fckpt.memory import PeakMemory as PeakMemory
from fckpt.memory import measure_peak as measure_peak
from fckpt.module import Functional as Functional
from fckpt.module import from_module as from_module
from fckpt.naming import checkpoint_name as checkpoint_name
from fckpt.plans import Plan as Plan
from fckpt.report.table import Residual as Residual
from fckpt.segments import sequential as sequential

__version__ = "0.1.0"
