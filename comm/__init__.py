"""Transports: messages between ranks within one process and over torch.distributed, and what can go wrong there."""

from .collectives import Collectives
from .errors import PeerLost, PipelineError, PipelineTimeout
from .failures import FailureBoard, Guard
from .groups import World, join_world, link_lanes, pipe_size
from .process_group import ProcessGroupTransport
from .transport import InProcessTransport, Mailbox, TensorSpec, Transport

__all__ = [
    "Collectives",
    "FailureBoard",
    "Guard",
    "InProcessTransport",
    "Mailbox",
    "PeerLost",
    "PipelineError",
    "PipelineTimeout",
    "ProcessGroupTransport",
    "TensorSpec",
    "Transport",
    "World",
    "join_world",
    "link_lanes",
    "pipe_size",
]
