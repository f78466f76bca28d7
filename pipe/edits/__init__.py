"""Named edits of a model: changes inside its stages, listed, checked and undone."""

from .listed import Edits, edit

__all__ = ["Edits", "edit"]
