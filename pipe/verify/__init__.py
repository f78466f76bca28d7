"""Verification: the same batch through the plain module and through the pipeline, compared."""

from .verification import Verification, VerificationError

__all__ = ["Verification", "VerificationError"]
