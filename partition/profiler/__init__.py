"""The profiler: what each part of a model costs on the device where it is. Needs torch.

parts    the model's cut units, and which are equal (`fingerprint`)
passes   timed as stages of a pipeline run (`timing`, `split`), the model as it was behind them (`state`)
memory   what is kept from forward to backward, and what is taken for a while
"""

from .measure import profile_model

__all__ = ["profile_model"]
