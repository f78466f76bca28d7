"""Profiles from formulas, for models that do not fit here: transformer shapes on a model of a device."""

from .device_model import DeviceModel
from .layers import TransformerSource, transformer_profile
from .runtime import MEGATRON_CORE, Runtime
from .transformer import Transformer

__all__ = ["MEGATRON_CORE", "DeviceModel", "Runtime", "Transformer", "TransformerSource", "transformer_profile"]
