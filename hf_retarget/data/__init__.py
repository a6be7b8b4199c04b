"""Images and labels: loading, preprocessing and minibatches."""

from hf_retarget.data.batches import Batch, BatchCache, ImageData, Split, derive_seed
from hf_retarget.data.files import EMBEDDED
from hf_retarget.data.labels import check_classes, match_labels
from hf_retarget.data.load import DataDescription, describe_data, load_data
from hf_retarget.data.preprocess import Preprocess, choose_preprocess
