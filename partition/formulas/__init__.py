"""Profiles from formulas, for models that do not fit here: transformer shapes on a model of a device."""

from .agreement import LeastErrors, least_errors
from .device_model import DeviceModel
from .layers import transformer_profile
from .measured import fit_measured, fit_sums, read_sums, read_trainings
from .source import TransformerSource
from .training import MeasuredTraining, Training
from .transformer import Transformer

__all__ = [
    "DeviceModel",
    "LeastErrors",
    "MeasuredTraining",
    "Training",
    "Transformer",
    "TransformerSource",
    "fit_measured",
    "fit_sums",
    "least_errors",
    "read_sums",
    "read_trainings",
    "transformer_profile",
]
