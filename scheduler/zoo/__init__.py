"""Generators of graphs for studies, seeded where random.

Chains and networks have the shapes, bytes and times of real ones, at any size; none needs
torch. Networks are generated as the whole step, forward and backward, or as the forward alone.
"""

from scheduler.zoo.chains import heterogeneous_chain, uniform_chain
from scheduler.zoo.images import densenet, mobilenet, resnet, unet
from scheduler.zoo.layered import random_layered
from scheduler.zoo.sequences import encoder_decoder, transformer

__all__ = [
    "densenet",
    "encoder_decoder",
    "heterogeneous_chain",
    "mobilenet",
    "random_layered",
    "resnet",
    "transformer",
    "unet",
    "uniform_chain",
]
