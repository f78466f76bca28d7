"""Transports: messages between ranks within one process and over torch.distributed, and what can go wrong there."""

from .codecs import Codec, Compress, LinkCodecs, LinkName, PackingTransport, read_compress
from .collectives import Collectives
from .failures import FailureBoard, Guard, PeerLost, PipelineError, PipelineTimeout, make_guard
from .groups import BACKEND, Groups, link_lanes, own_device
from .host_clocks import HostClocks, machine
from .mesh import Coordinates, MeshPlace, ProcessMesh, World, read_mesh
from .parts import PartsTransport
from .process_group import ProcessGroupTransport
from .rendezvous import join_world
from .staged import staged
from .transport import InProcessTransport, Mailbox, TensorSpec, Transport, TransportAround

__all__ = [
    "BACKEND",
    "Codec",
    "Collectives",
    "Compress",
    "Coordinates",
    "FailureBoard",
    "Groups",
    "Guard",
    "HostClocks",
    "InProcessTransport",
    "LinkCodecs",
    "LinkName",
    "Mailbox",
    "MeshPlace",
    "PackingTransport",
    "PartsTransport",
    "PeerLost",
    "PipelineError",
    "PipelineTimeout",
    "ProcessGroupTransport",
    "ProcessMesh",
    "TensorSpec",
    "Transport",
    "TransportAround",
    "World",
    "join_world",
    "link_lanes",
    "machine",
    "make_guard",
    "own_device",
    "read_compress",
    "read_mesh",
    "staged",
]
