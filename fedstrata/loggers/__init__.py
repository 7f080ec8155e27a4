"""Loggers: the numbers of a run, round by round, in the tools in which people keep their experiments.

``tensorboard``, ``mlflow`` and ``wandb`` are written as every component is, with parameters where wanted:
``--log "wandb(project=layers)"``. They look on: no number of a run depends on them, so that they belong to the call
that makes a run, as its folder does, and not to its experiment. By default they write into the folder of the run, and
nothing leaves the machine. One that fails is off from then on, with a warning, and the run goes on.

The names of the numbers are those of the run's own tables, with ``/`` for ``.``: ``client_after/accuracy/mean``; those
of layers begin with ``layers/``, the metric and the name of the layer: ``layers/cosine/stage1.0.conv1``.
"""

from fedstrata.loggers.logger import LoggedRun, Logger, Writer, logged_names, loggers
from fedstrata.loggers.logging import keep_log, make_loggers
from fedstrata.loggers.mlflow import MLflow
from fedstrata.loggers.tensorboard import TensorBoard
from fedstrata.loggers.wandb import WeightsAndBiases

__all__ = [
    "LoggedRun", "Logger", "MLflow", "TensorBoard", "WeightsAndBiases", "Writer", "keep_log", "logged_names", "loggers",
    "make_loggers",
]  # fmt: skip
