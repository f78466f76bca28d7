"""Profiles from formulas, for models that do not fit here: transformer shapes on a model of a device."""

from .device_model import DeviceModel
from .layers import TransformerSource, transformer_profile
from .transformer import Transformer

__all__ = ["DeviceModel", "Transformer", "TransformerSource", "transformer_profile"]
