"""Profiles from formulas, for models that do not fit here: transformer shapes on a model of a device."""

from .device_model import DeviceModel
from .transformer import Transformer, TransformerSource

__all__ = ["DeviceModel", "Transformer", "TransformerSource"]
