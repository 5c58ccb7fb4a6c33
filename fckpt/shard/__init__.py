"""Functions on many devices: meshes, collectives, `shard_map` and `pmap`."""

from fckpt.shard.collectives import all_gather as all_gather
from fckpt.shard.collectives import all_to_all as all_to_all
from fckpt.shard.collectives import axis_index as axis_index
from fckpt.shard.collectives import axis_size as axis_size
from fckpt.shard.collectives import pmax as pmax
from fckpt.shard.collectives import pmean as pmean
from fckpt.shard.collectives import pmin as pmin
from fckpt.shard.collectives import ppermute as ppermute
from fckpt.shard.collectives import psum as psum
from fckpt.shard.collectives import psum_scatter as psum_scatter
from fckpt.shard.collectives import pvary as pvary
from fckpt.shard.mapped import pmap as pmap
from fckpt.shard.mapped import shard_map as shard_map
from fckpt.shard.mesh import Mesh as Mesh
from fckpt.shard.mesh import use_mesh as use_mesh
from fckpt.shard.setup import fake_mesh as fake_mesh
from fckpt.shard.setup import init_mesh as init_mesh
from fckpt.shard.simulation import Simulation as Simulation
from fckpt.shard.simulation import sim as sim
from fckpt.shard.specs import P as P
from fckpt.shard.specs import shard as shard
from fckpt.shard.specs import unshard as unshard
