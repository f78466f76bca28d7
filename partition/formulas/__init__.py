"""Profiles from formulas, for models that do not fit here: transformer shapes on a model of a device."""

from .device_model import DeviceModel
from .layers import transformer_profile
from .source import TransformerSource
from .transformer import Transformer

__all__ = ["DeviceModel", "Transformer", "TransformerSource", "transformer_profile"]
