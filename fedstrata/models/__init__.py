"""Models by name, and the way to bring one's own ``nn.Module``."""

from fedstrata.models import cnn, densenet, dino, mlp, player, resnet, simplecnn, textcnn, timm, transformer, vgg, vit
from fedstrata.models.base import ModelSpec, build_model, models, refuse_frozen

__all__ = [
    "ModelSpec",
    "build_model",
    "cnn",
    "densenet",
    "dino",
    "mlp",
    "models",
    "player",
    "refuse_frozen",
    "resnet",
    "simplecnn",
    "textcnn",
    "timm",
    "transformer",
    "vgg",
    "vit",
]
