"""Functions on many devices: meshes, collectives, `shard_map` and `pmap`."""

from fckpt.spmd.checkpoint import load as load
from fckpt.spmd.checkpoint import save as save
from fckpt.spmd.collectives import all_gather as all_gather
from fckpt.spmd.collectives import all_to_all as all_to_all
from fckpt.spmd.collectives import axis_index as axis_index
from fckpt.spmd.collectives import axis_size as axis_size
from fckpt.spmd.collectives import pmax as pmax
from fckpt.spmd.collectives import pmean as pmean
from fckpt.spmd.collectives import pmin as pmin
from fckpt.spmd.collectives import ppermute as ppermute
from fckpt.spmd.collectives import psum as psum
from fckpt.spmd.collectives import psum_scatter as psum_scatter
from fckpt.spmd.collectives import pvary as pvary
from fckpt.spmd.launching import launch as launch
from fckpt.spmd.links import Link as Link
from fckpt.spmd.mapped import pmap as pmap
from fckpt.spmd.mapped import shard_map as shard_map
from fckpt.spmd.mesh import Mesh as Mesh
from fckpt.spmd.mesh import use_mesh as use_mesh
from fckpt.spmd.setup import fake_mesh as fake_mesh
from fckpt.spmd.setup import init_mesh as init_mesh
from fckpt.spmd.simulation import Simulation as Simulation
from fckpt.spmd.simulation import sim as sim
from fckpt.spmd.specs import P as P
from fckpt.spmd.specs import shard as shard
from fckpt.spmd.specs import unshard as unshard
