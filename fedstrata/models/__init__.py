"""Models by name, and the way to bring one's own ``nn.Module``."""

from fedstrata.models import cnn, dino, mlp, resnet, simplecnn, textcnn, transformer, vgg, vit
from fedstrata.models.base import ModelSpec, build_model, models

__all__ = [
    "ModelSpec",
    "build_model",
    "cnn",
    "dino",
    "mlp",
    "models",
    "resnet",
    "simplecnn",
    "textcnn",
    "transformer",
    "vgg",
    "vit",
]
