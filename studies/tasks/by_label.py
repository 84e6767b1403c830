"""Tasks whose workers hold different labels: see `gradherd.lab.study.shards`."""

from gradherd.lab.study.shards import unshared
from gradherd.lab.tasks.cifar10_lenet import Cifar10LeNet
from gradherd.lab.tasks.digits import Digits

LeNet16 = unshared(Cifar10LeNet, 16)
Digits4 = unshared(Digits, 4)
