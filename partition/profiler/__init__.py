"""The profiler: what each cut unit of a model costs on the device where it is. Needs torch.

passes   units timed as stages of a pipeline run (`clock`), the model restored afterwards
memory   what is kept from forward to backward, and what is taken for a while
"""

from .measure import profile_model

__all__ = ["profile_model"]
