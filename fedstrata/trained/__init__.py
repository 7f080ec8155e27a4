"""A model in use: what training gave, with all that one must know to predict with it.

=============  ========================================================================================================
``card.py``    what stands beside the weights: architecture, preprocessing, classes, where it comes from; plain JSON
``model.py``   the ready module: raw inputs in, classes out; saved, and loaded again
``inputs.py``  what people have (arrays, images, files) as the tensor that a model takes
``export.py``  folders for others: safetensors with a card, ONNX, the Hugging Face hub
=============  ========================================================================================================
"""

from fedstrata.trained.card import Card, preprocessing_of
from fedstrata.trained.model import TrainedModel

__all__ = ["Card", "TrainedModel", "preprocessing_of"]
