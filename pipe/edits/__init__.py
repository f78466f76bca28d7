"""Named edits of a model: changes inside its stages, listed, checked and undone."""

from .listed import Edits, UntilBuilt, edit

__all__ = ["Edits", "UntilBuilt", "edit"]
