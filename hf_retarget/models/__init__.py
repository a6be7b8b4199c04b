"""References to models and how they are built."""

from hf_retarget.models.build import empty_model, random_model

__all__ = ["empty_model", "random_model"]
