"""Tasks whose workers hold different labels: see `gradherd.study.shards`."""

from gradherd.study.shards import unshared
from gradherd.tasks.cifar10_lenet import Cifar10LeNet
from gradherd.tasks.digits import Digits

LeNet16 = unshared(Cifar10LeNet, 16)
Digits4 = unshared(Digits, 4)
