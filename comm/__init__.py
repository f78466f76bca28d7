"""Transports: messages between ranks within one process and over torch.distributed, and what can go wrong there."""

from .codecs import Codec as Codec
from .codecs import Compress as Compress
from .codecs import LinkCodecs as LinkCodecs
from .codecs import LinkName as LinkName
from .codecs import PackingTransport as PackingTransport
from .codecs import read_compress as read_compress
from .collectives import Collectives as Collectives
from .failures import FailureBoard as FailureBoard
from .failures import Guard as Guard
from .failures import PeerLost as PeerLost
from .failures import PipelineError as PipelineError
from .failures import PipelineTimeout as PipelineTimeout
from .failures import make_guard as make_guard
from .groups import BACKEND as BACKEND
from .groups import Groups as Groups
from .groups import link_lanes as link_lanes
from .groups import own_device as own_device
from .host_clocks import HostClocks as HostClocks
from .host_clocks import machine as machine
from .mesh import Coordinates as Coordinates
from .mesh import MeshPlace as MeshPlace
from .mesh import ProcessMesh as ProcessMesh
from .mesh import World as World
from .mesh import read_mesh as read_mesh
from .parts import PartsTransport as PartsTransport
from .process_group import ProcessGroupTransport as ProcessGroupTransport
from .rendezvous import join_world as join_world
from .staged import staged as staged
from .transport import InProcessTransport as InProcessTransport
from .transport import Mailbox as Mailbox
from .transport import TensorSpec as TensorSpec
from .transport import Transport as Transport
from .transport import TransportAround as TransportAround

# A type checker would take names that it cannot read for none.
globals()["__all__"] = [n for n, v in [*globals().items()] if n[0] != "_" and not hasattr(v, "__spec__")]
