"""Optimizers: pure functions that update one weight from its spec, gradient and slots."""

from tekso.framework.optimizers.adafactor import Adafactor
from tekso.framework.optimizers.adagrad import Adagrad
from tekso.framework.optimizers.adam import Adam, AdamW
from tekso.framework.optimizers.layerwise import LAMB, LARS
from tekso.framework.optimizers.optimizer import Optimizer
from tekso.framework.optimizers.rmsprop import RMSProp
from tekso.framework.optimizers.sgd import SGD, Momentum, Nesterov

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Momentum",
    "Nesterov",
    "Optimizer",
    "RMSProp",
]
