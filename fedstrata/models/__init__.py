"""Models by name, and the way to bring one's own ``nn.Module``."""

from fedstrata.models import cnn, mlp, resnet, simplecnn, vgg
from fedstrata.models.base import ModelSpec, build_model, models

__all__ = ["ModelSpec", "build_model", "cnn", "mlp", "models", "resnet", "simplecnn", "vgg"]
