"""Tasks whose workers have different labels: see `gradherd.lab.study.label_shards`."""

from gradherd.lab.study.label_shards import sharded_by_label
from gradherd.lab.tasks.digits import Digits
from gradherd.lab.tasks.lenet import Cifar10LeNet

LeNet16 = sharded_by_label(Cifar10LeNet, 16)
Digits4 = sharded_by_label(Digits, 4)
