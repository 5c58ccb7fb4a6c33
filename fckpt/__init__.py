"""fckpt: train the same function in less memory. Functional rematerialisation for PyTorch."""

from fckpt.api import remat as remat
from fckpt.autodiff import grad as grad
from fckpt.autodiff import grad_and_value as grad_and_value
from fckpt.autodiff import vjp as vjp
from fckpt.errors import ArgumentTypeError as ArgumentTypeError
from fckpt.errors import ArgumentValueError as ArgumentValueError
from fckpt.errors import ClosureError as ClosureError
from fckpt.errors import FckptError as FckptError
from fckpt.errors import ImpureFunctionError as ImpureFunctionError
from fckpt.errors import MutationError as MutationError
from fckpt.errors import OpaqueOutputError as OpaqueOutputError
from fckpt.errors import RandomStateError as RandomStateError
from fckpt.memory import PeakMemory as PeakMemory
from fckpt.memory import measure_peak as measure_peak
from fckpt.module import Functional as Functional
from fckpt.module import from_module as from_module
from fckpt.segments import sequential as sequential

__version__ = "0.1.0"
