"""Models: resolving references, building, loading, comparing and saving."""

from hf_retarget.models.checkpoint import Checkpoint, save_model
from hf_retarget.models.compare import (
    Comparison,
    Difference,
    check_alike,
    compare_checkpoints,
    head_names,
    list_differences,
)
from hf_retarget.models.reference import Peeked, Reference, load_checkpoint, peek_checkpoint
from hf_retarget.models.timm_models import empty_model, random_model
