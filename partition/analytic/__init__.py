"""Profiles from formulas, for models that do not fit here: transformer shapes on a model of a device, and fits of its
constants to measured steps."""

from .calibration import Calibration, Scales, calibrate
from .device_model import DeviceModel
from .layers import TransformerSource, transformer_profile
from .runtime import MEGATRON_CORE, NANOTRON, Runtime
from .transformer import Transformer

__all__ = [
    "MEGATRON_CORE",
    "NANOTRON",
    "Calibration",
    "DeviceModel",
    "Runtime",
    "Scales",
    "Transformer",
    "TransformerSource",
    "calibrate",
    "transformer_profile",
]
